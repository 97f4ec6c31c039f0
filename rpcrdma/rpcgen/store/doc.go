// Package store is the XDR of an example program, generated.
package store

//go:generate ./generate.sh
