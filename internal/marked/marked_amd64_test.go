package marked

import "testing"

// What runs on other processors gives the same.
func TestWithoutVectors(t *testing.T) {
	defer func(was bool) { vectors = was }(vectors)
	vectors = false
	t.Run("bytes", TestBytes)
	t.Run("edges", TestEdges)
}
