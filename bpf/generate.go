package bpf

//go:generate go tool bpf2go -cflags "-O2 -g -Wall -Wextra -Werror" -type endpoint -type peer -type address steer steer.c
