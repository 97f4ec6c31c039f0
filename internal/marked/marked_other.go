//go:build !amd64

package marked

const vectors = false

func join(_, _ *byte, _, _, _, _ int) { panic("marked: no vectors") }
