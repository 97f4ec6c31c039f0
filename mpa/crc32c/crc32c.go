// Package crc32c is the CRC of MPA: CRC32c as hash/crc32 computes it, at the
// lengths of FPDUs in about a third of the time where the processor has
// carry-less multiplication of 512-bit vectors.
package crc32c

import "hash/crc32"

var table = crc32.MakeTable(crc32.Castagnoli)

// Update returns the CRC32c of octets whose CRC32c so far is crc, and p behind
// them.
func Update(crc uint32, p []byte) uint32 { return update(crc, p) }
