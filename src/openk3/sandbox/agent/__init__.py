"""The program that runs as process 1 inside every sandbox. Standard library only, one thread."""
