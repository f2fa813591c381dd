"""mpi4py on a host on which MPI cannot start: MPI ends each process that imports it, as Open MPI 4 does there."""
