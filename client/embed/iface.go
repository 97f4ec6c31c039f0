package embed

import (
	"errors"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/dataplane"
)

func (n *Node) openInterface(cfg *Config, opts *ctrl.Options) ([]dataplane.Queue, error) {
	return nil, errors.New("embed: not yet")
}
