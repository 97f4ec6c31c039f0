package testenv

import "os"

// Sockets reports whether tests between two nodes use kernel sockets (TRANSPORT=socket) instead of
// an in-process wire.
func Sockets() bool { return os.Getenv("TRANSPORT") == "socket" }
