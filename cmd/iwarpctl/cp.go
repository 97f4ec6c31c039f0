package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/filecopy"
)

func (c *command) cp() *cobra.Command {
	return &cobra.Command{
		Use:   "cp FILE ADDR:PORT/NAME | cp ADDR:PORT/NAME FILE",
		Short: "Copy a file to or from another host's iwarpctl serve, by RDMA",
		Long: "cp puts a file by RDMA Write into the other side's memory, or gets one by RDMA\n" +
			"Read from there. SHA-256 is compared at the end, and only then the file gets its\n" +
			"name. An empty NAME, one that ends with a slash, or a folder as FILE, keeps the name\n" +
			"of the source. A local file whose name looks like ADDR:PORT/NAME is written with ./ in front.",
		Example: "  iwarpctl cp big.tar 10.0.0.1:7176/\n" +
			"  iwarpctl cp 10.0.0.1:7176/big.tar /tmp\n" +
			"  iwarpctl cp big.tar '[fd00::1]:7176/archive/big.tar'",
		Args: usageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			job, err := parseCopy(args[0], args[1])
			if err != nil {
				return err
			}
			return c.runCopy(cmd.Context(), job)
		},
	}
}

// copyJob is one cp: exactly one side is remote.
type copyJob struct {
	put   bool
	host  string // ADDR:PORT
	name  string // there
	local string
}

func parseCopy(from, to string) (copyJob, error) {
	fromHost, fromName, get := splitRemote(from)
	toHost, toName, put := splitRemote(to)
	var j copyJob
	switch {
	case put && get:
		return j, usageError{errors.New("cp: both sides are remote: one must be a local file")}
	case put:
		j = copyJob{put: true, host: toHost, name: toName, local: from}
		if j.name == "" || strings.HasSuffix(j.name, "/") { // a folder there
			j.name += filepath.Base(from)
		}
	case get:
		j = copyJob{host: fromHost, name: fromName, local: to}
		if info, err := os.Stat(to); err == nil && info.IsDir() {
			j.local = filepath.Join(to, path.Base(fromName))
		}
	default:
		return j, usageError{errors.New("cp: no side is remote: write it as ADDR:PORT/NAME")}
	}
	if err := filecopy.CheckName(j.name); err != nil {
		return j, usageError{fmt.Errorf("cp: %w", err)}
	}
	return j, nil
}

// copyResult is the JSON form of the outcome.
type copyResult struct {
	Op         string  `json:"op"`
	Verb       string  `json:"verb"`
	Name       string  `json:"name"`
	Peer       string  `json:"peer"`
	Size       int64   `json:"size"`
	Seconds    float64 `json:"seconds"`
	GbitPerSec float64 `json:"gbit_per_s"`
	SHA256     string  `json:"sha256"`
}

func (c *command) runCopy(ctx context.Context, j copyJob) error {
	addr, err := resolve(ctx, j.host, copyPort)
	if err != nil {
		return err
	}
	// Whatever is wrong with the local side shows before anything is connected.
	store, err := filecopy.OpenStore(filepath.Dir(j.local))
	if err != nil {
		return fmt.Errorf("cp: folder of the file: %w", err)
	}
	defer store.Close()
	var src *os.File
	var size int64
	if j.put {
		var info os.FileInfo
		if src, info, err = openSource(j.local); err != nil {
			return fmt.Errorf("cp: %w", err)
		}
		defer src.Close()
		size = info.Size()
	}

	dev, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	client, err := filecopy.DialConfig(ctx, dev, addr, c.over(filecopy.Config()))
	if err != nil {
		return peerError{fmt.Errorf("cp: connect to %s: %w", addr, err)}
	}
	defer client.Close()
	bar := c.newBar(path.Base(j.name))
	client.Progress = bar.update
	began := time.Now()
	res := copyResult{Op: "get", Verb: "RDMA Read", Name: j.name, Peer: addr}
	var r filecopy.Result
	if j.put {
		res.Op, res.Verb = "put", "RDMA Write"
		r, err = client.Put(ctx, src, size, j.name)
	} else {
		r, err = client.Get(ctx, j.name, store, filepath.Base(j.local))
	}
	bar.clear()
	if err != nil {
		return copyFailed(addr, err)
	}
	res.Size, res.Seconds, res.SHA256 = r.Size, time.Since(began).Seconds(), hex.EncodeToString(r.Sum[:])
	res.GbitPerSec = gbit(res.Size, res.Seconds)
	if c.json {
		return c.print(res)
	}
	fmt.Fprintf(c.out, "%s %s: %d octets by %s in %.2f s, %s, sha256 %s\n", res.Op, res.Name, res.Size, res.Verb, res.Seconds, rate(res.Size, res.Seconds), res.SHA256)
	return nil
}

// openSource opens a regular file.
func openSource(name string) (*os.File, os.FileInfo, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // which does not wait for the writer of a pipe
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &os.PathError{Op: "copy", Path: name, Err: errors.New("not a regular file")}
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// copyFailed marks what is neither a file's fault nor told by the other side
// as the connection's.
func copyFailed(addr string, err error) error {
	var local *filecopy.Error
	var remote *filecopy.RemoteError
	if errors.As(err, &local) || errors.As(err, &remote) {
		return fmt.Errorf("cp: %s: %w", addr, err)
	}
	return peerError{fmt.Errorf("cp: %s: %w", addr, err)}
}
