// Package nfsv3 has the XDR of NFS version 3 (RFC 1813), generated.
package nfsv3

//go:generate ./generate.sh
