"""The commands of the program: each module adds its options and carries one of them out."""
