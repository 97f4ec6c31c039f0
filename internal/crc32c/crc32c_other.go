//go:build !amd64

package crc32c

const vectors, laned = false, false

func pass(_, _ *byte, _ int, _, _ uint32, _ int) (reg, even, odd uint32) { panic("crc32c: no vectors") }

func short(_ *byte, _ int, _ uint32) (reg, sum uint32) { panic("crc32c: no vectors") }

func inBlocks(_, _ []byte, _ uint32) (crc2, sum uint32) { panic("crc32c: no lanes") }
