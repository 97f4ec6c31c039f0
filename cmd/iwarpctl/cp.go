package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/filecopy"
)

type cpFlags struct {
	recursive, preserve, resume bool
	port                        int
	checksum                    string
}

func (c *command) cp() *cobra.Command {
	var f cpFlags
	cmd := &cobra.Command{
		Use:   "cp [-rp] [--resume] SOURCE... TARGET",
		Short: "Copy files to or from another host's iwarpctl serve, by RDMA",
		Long: "cp copies files to another host by RDMA Write, or from it by RDMA Read. Either\n" +
			"all sources or the target must be remote: HOST:PATH, or HOST:PORT/PATH for a\n" +
			"port other than that of -P. HOST is a name or an address, with brackets around\n" +
			"an IPv6 address; PATH is relative to the folder that is served. If PATH is\n" +
			"empty, ends with a slash or is a folder, the file keeps the name of the source.\n" +
			"Write ./ before the name of a local file that contains a colon.\n\n" +
			"A file gets its final name only after its checksum has been verified.",
		Example: "  iwarpctl cp big.tar server:\n" +
			"  iwarpctl cp *.log 10.0.0.1:archive/\n" +
			"  iwarpctl cp -rp server:project /tmp\n" +
			"  iwarpctl cp --resume big.tar '[fd00::1]:7200/archive/big.tar'",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				return usageError{fmt.Errorf("cp: %q: the target is missing: write it as iwarpctl cp SOURCE... TARGET, such as \"cp file host:\"", args[0])}
			}
			return usageArgs(cobra.MinimumNArgs(2))(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			job, err := parseCopy(args[:len(args)-1], args[len(args)-1], &f)
			if err != nil {
				return err
			}
			return c.runCopy(cmd.Context(), job)
		},
	}
	fl := cmd.Flags()
	fl.BoolVarP(&f.recursive, "recursive", "r", false, "copy folders recursively")
	fl.BoolVarP(&f.preserve, "preserve", "p", false, "preserve permissions and modification times")
	fl.BoolVar(&f.resume, "resume", false, "continue a copy with --resume that was interrupted")
	fl.IntVarP(&f.port, "port", "P", copyPort, "port of the server")
	fl.StringVar(&f.checksum, "checksum", "xxh128", "xxh128, blake3 or sha256; an older server may choose another one")
	completes(cmd, "checksum", "xxh128", "blake3", "sha256")
	return cmd
}

// copyJob describes a cp: either the sources or the target are remote.
type copyJob struct {
	put     bool
	host    string // HOST or HOST:PORT
	sources []string
	target  string
	flags   *cpFlags
	hash    filecopy.Hash
}

// single reports whether at most one file is copied.
func (j *copyJob) single() bool { return len(j.sources) == 1 && !j.flags.recursive }

func parseCopy(sources []string, target string, f *cpFlags) (*copyJob, error) {
	wrong := func(format string, args ...any) (*copyJob, error) {
		return nil, usageError{fmt.Errorf("cp: "+format, args...)}
	}
	j := &copyJob{flags: f}
	var err error
	if j.hash, err = filecopy.ParseHash(f.checksum); err != nil {
		return wrong("--%w", err)
	}
	if target == "" || slices.Contains(sources, "") {
		return wrong("a name is empty: is a variable of the shell not set?")
	}
	to, err := splitRemote(target)
	if err != nil {
		return wrong("%w", err)
	}
	j.put, j.target = to.host != "", target
	if j.put {
		j.host, j.target = to.host, to.path
	}
	for _, s := range sources {
		from, err := splitRemote(s)
		switch {
		case err != nil:
			return wrong("%w", err)
		case from.host != "" && j.put:
			return wrong("%q and %q are both on other hosts: copy to this host first; a local file is written ./%s", s, target, s)
		case from.host == "" && !j.put:
			mean := target
			if _, err := os.Stat(target); err == nil || strings.Contains(target, "/") || strings.HasPrefix(target, "[") && !strings.HasSuffix(target, "]") {
				mean = "HOST"
			}
			return wrong("neither %q nor %q is on another host: write a remote file as HOST:PATH, such as %s:", s, target, mean)
		case j.put:
			j.sources = append(j.sources, s)
			continue
		case j.host != "" && j.host != from.host:
			return wrong("sources on several hosts (%s, %s): copy from one at a time", j.host, from.host)
		}
		j.host = from.host
		j.sources = append(j.sources, from.path)
	}
	// Check the names known so far; source folders add more.
	names := []string{strings.TrimSuffix(j.target, "/")}
	if !j.put {
		names = j.sources
	}
	for _, n := range names {
		switch {
		case n == "" && (j.put || f.recursive):
		case n == "":
			return wrong("%s: names no file: write %s:PATH, or copy all that is there with cp -r", j.host, j.host)
		default:
			if err := filecopy.CheckName(n); err != nil {
				return wrong("%w", err)
			}
		}
	}
	return j, j.checkNames()
}

// checkNames returns an error if two of several sources, which all go to one folder, would get the
// same name there.
func (j *copyJob) checkNames() error {
	if len(j.sources) == 1 {
		return nil
	}
	first := make(map[string]string)
	for _, s := range j.sources {
		name := path.Base(s)
		if j.put {
			var err error
			if name, err = localName(s); err != nil {
				return err
			}
		}
		if other, ok := first[name]; ok {
			return fileError{fmt.Errorf("cp: %s and %s would both become %s: copy one of them by itself, to another name", other, s, name)}
		}
		first[name] = s
	}
	return nil
}

// localName returns the last part of the name of a local file or folder, which "." and ".." have too.
func localName(name string) (string, error) {
	full, err := filepath.Abs(name)
	return filepath.Base(full), err
}

// checkSource returns an error if a local source cannot be copied.
func (j *copyJob) checkSource(name string) error {
	info, err := os.Stat(name)
	if err == nil && info.IsDir() {
		if j.flags.recursive {
			return nil
		}
		return fileError{fmt.Errorf("cp: %s is a folder: copy it with cp -r", name)}
	}
	if errors.Is(err, fs.ErrNotExist) && strings.ContainsAny(name, "*?[") {
		return fileError{fmt.Errorf("cp: no file matches %s", name)}
	}
	f, _, err := openSource(name)
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	return f.Close()
}

// checkTarget returns an error if the local target cannot be written.
func (j *copyJob) checkTarget() error {
	info, err := os.Stat(j.target)
	folder := err == nil && info.IsDir()
	switch {
	case folder:
		return writable(j.target)
	case strings.HasSuffix(j.target, "/"):
		return fileError{fmt.Errorf("cp: no folder %s: make it first", j.target)}
	case len(j.sources) > 1:
		return fileError{fmt.Errorf("cp: %s is not a folder, and there are %d sources: name a folder as the target", j.target, len(j.sources))}
	case err == nil && !info.Mode().IsRegular():
		return fileError{fmt.Errorf("cp: %s exists and is not a regular file", j.target)}
	}
	dir := filepath.Dir(j.target)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return fileError{fmt.Errorf("cp: no folder %s: make it first", dir)}
	}
	return writable(dir)
}

func writable(dir string) error {
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return fileError{fmt.Errorf("cp: cannot write to the folder %s: %w", dir, err)}
	}
	return nil
}

var errNotRegular = errors.New("not a regular file: cp copies files and folders only")

// openSource opens a regular file.
func openSource(name string) (*os.File, os.FileInfo, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // does not block if it is a FIFO
	if err != nil {
		link, lerr := os.Readlink(name)
		switch {
		case errors.Is(err, fs.ErrNotExist) && lerr == nil:
			err = &os.PathError{Op: "open", Path: name, Err: fmt.Errorf("a symbolic link to %s: %w", link, unix.ENOENT)}
		case errors.Is(err, fs.ErrPermission):
			err = &os.PathError{Op: "open", Path: name, Err: fmt.Errorf("%w: copy as a user who may read it", fs.ErrPermission)}
		case errors.Is(err, unix.ELOOP):
			err = &os.PathError{Op: "open", Path: name, Err: errors.New("a symbolic link that leads back to itself")}
		case errors.Is(err, unix.ENXIO): // a socket
			err = &os.PathError{Op: "copy", Path: name, Err: errNotRegular}
		}
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &os.PathError{Op: "copy", Path: name, Err: errNotRegular}
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}
