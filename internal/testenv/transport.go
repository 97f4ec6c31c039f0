package testenv

import "os"

// Sockets reports whether tests of programs over a pair of nodes run over kernel sockets
// (TRANSPORT=socket) and not over a wire within the process.
func Sockets() bool { return os.Getenv("TRANSPORT") == "socket" }
