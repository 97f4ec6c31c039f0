package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iwarpd/iwarpd/app/filecopy"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// copyPort is the default port of iwarpctl serve.
const copyPort = 7176

type serveFlags struct {
	dir, listen string
	clients     int
}

func (c *command) serve() *cobra.Command {
	var f serveFlags
	cmd := &cobra.Command{
		Use:   "serve --dir D [--listen ADDR:PORT]",
		Short: "Serve a folder to iwarpctl cp on other hosts",
		Long: "serve lets iwarpctl cp on other hosts read and write a folder. Names are\n" +
			"relative to the folder and cannot lead out of it. A file gets its final name\n" +
			"only when it is completely on disk. Anyone who can reach the port can read and\n" +
			"write the folder.",
		Example: "  iwarpctl serve --dir /srv/files --listen 10.0.0.1:7176",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.dir == "" {
				return usageError{errors.New("serve: --dir D is missing: the folder to serve")}
			}
			if f.clients < 1 {
				return usageError{fmt.Errorf("serve: --max-clients %d: must be 1 or more", f.clients)}
			}
			return c.runServe(cmd.Context(), &f)
		},
	}
	cmd.Flags().StringVar(&f.dir, "dir", "", "folder to serve")
	cmd.Flags().StringVar(&f.listen, "listen", fmt.Sprintf(":%d", copyPort), "address to listen on, ADDR:PORT or :PORT")
	cmd.Flags().IntVar(&f.clients, "max-clients", 32, "maximum number of concurrent clients; each uses 8 MiB of registered memory")
	return cmd
}

func (c *command) runServe(ctx context.Context, f *serveFlags) error {
	addr, err := listenAddr(f.listen, copyPort)
	if err != nil {
		return err
	}
	store, err := filecopy.OpenStore(f.dir)
	if err != nil {
		return fmt.Errorf("serve: %w: give the folder to serve by --dir", err)
	}
	defer store.Close()
	server := &filecopy.Server{Store: store, MaxClients: f.clients, Tell: c.served}
	return c.serveAt(ctx, addr, filecopy.Config(), true, func(_ *iwarp.Device, l *iwarp.Listener) error {
		fmt.Fprintf(c.err, "serving %s\n", f.dir)
		if err := server.Serve(ctx, l); err != nil {
			return fmt.Errorf("serve: %w", err)
		}
		return nil
	})
}

// served is the JSON form of a line.
type served struct {
	Peer     string  `json:"peer"`
	Op       string  `json:"op,omitempty"`
	Name     string  `json:"name,omitempty"`
	Size     int64   `json:"size"`
	Checksum string  `json:"checksum,omitempty"`
	SHA256   string  `json:"sha256,omitempty"`
	Seconds  float64 `json:"seconds,omitempty"`
	Error    string  `json:"error,omitempty"`
}

// served prints a line for each file.
func (c *command) served(peer netip.AddrPort, e filecopy.Event) {
	s := served{Peer: peer.String(), Name: e.Name, Seconds: e.Took.Seconds()}
	switch {
	case e.Put:
		s.Op = "put"
	case e.Name != "":
		s.Op = "get"
	}
	switch {
	case errors.Is(e.Err, context.Canceled):
		s.Error = "this server was stopped"
	case e.Err != nil:
		s.Error = strings.Join(strings.Fields(peerReason(e.Err, s.Peer)), " ")
	default:
		s.Size, s.Checksum = e.Size, e.Hash.Text(e.Sum)
		if e.Hash == filecopy.SHA256 {
			s.SHA256 = hex.EncodeToString(e.Sum[:])
		}
	}
	switch {
	case c.json:
		_ = encoder(c.out).Encode(s)
	case s.Op == "":
		fmt.Fprintf(c.out, "%s: %s\n", s.Peer, printable.String(s.Error))
	case s.Error != "": // which repeats the name
		fmt.Fprintf(c.out, "%s: %s %q: %s\n", s.Peer, s.Op, s.Name, printable.String(s.Error))
	default:
		fmt.Fprintf(c.out, "%s: %s %q: %s, %s, %s\n", s.Peer, s.Op, s.Name, printable.Count(s.Size, "byte"), rate(s.Size, s.Seconds), s.Checksum)
	}
}
