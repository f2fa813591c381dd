"""The commands of the program: each module adds the options of one or more of them and carries them out."""
