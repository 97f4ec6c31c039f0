package nfs

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// keySize is the length of a key file, in bytes.
const keySize = 32

// DefaultKeyFile returns the name of the key file for the current user: nfs.key in
// $STATE_DIRECTORY (systemd.exec(5)) or /var/lib/iwarpd for root, and in
// $XDG_STATE_HOME/iwarpd or ~/.local/state/iwarpd for others. It creates the folder, with mode 0700,
// if it does not exist.
func DefaultKeyFile() (string, error) {
	name, err := defaultKeyFile(os.Geteuid())
	if err == nil {
		err = os.MkdirAll(filepath.Dir(name), 0o700)
	}
	if err != nil {
		return "", fmt.Errorf("nfs: key file: %w; name one with --key-file", err)
	}
	return name, nil
}

func defaultKeyFile(uid int) (string, error) {
	dir := "/var/lib/iwarpd"
	if l, _, _ := strings.Cut(os.Getenv("STATE_DIRECTORY"), ":"); filepath.IsAbs(l) {
		dir = l
	} else if uid != 0 {
		state := os.Getenv("XDG_STATE_HOME")
		if !filepath.IsAbs(state) { // the XDG specification ignores relative paths
			home, err := os.UserHomeDir()
			if err != nil {
				return "", err
			}
			state = filepath.Join(home, ".local", "state")
		}
		dir = filepath.Join(state, "iwarpd")
	}
	return filepath.Join(dir, "nfs.key"), nil
}

// loadKey returns the key in the file name. A file that does not exist is created,
// with a random key and mode 0600.
func loadKey(name string) (key [keySize]byte, err error) {
	key, err = readKey(name)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if err := createKey(name); err != nil && !errors.Is(err, fs.ErrExist) {
		return key, fmt.Errorf("create key file %s: %w", name, err)
	}
	return readKey(name) // if two processes create it, use the first one's key
}

// readKey reads and checks a key file.
func readKey(name string) (key [keySize]byte, err error) {
	// Without O_NONBLOCK the open of a FIFO would block.
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return key, fmt.Errorf("key file: %w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return key, fmt.Errorf("key file %s: %w", name, err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return key, fmt.Errorf("key file %s: is not a regular file", name)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return key, fmt.Errorf("key file %s: belongs to user %d; remove it to get a new key (clients must mount again)", name, st.Uid)
	case st.Mode&0o077 != 0:
		return key, fmt.Errorf("key file %s: mode %#o lets others read or change it; remove it to get a new key (clients must mount again)", name, st.Mode&0o7777)
	case st.Size != keySize:
		return key, fmt.Errorf("key file %s: has %d bytes, not %d; remove it to get a new key (clients must mount again)", name, st.Size, keySize)
	}
	if _, err := io.ReadFull(f, key[:]); err != nil {
		return key, fmt.Errorf("key file %s: %w", name, err)
	}
	if key == [keySize]byte{} { // a file that lost its data in a crash
		return key, fmt.Errorf("key file %s: has only zeros; remove it to get a new key (clients must mount again)", name)
	}
	return key, nil
}

// createKey creates a key file and commits it to disk, or returns fs.ErrExist. It links a temporary
// file, so that no reader sees an incomplete key.
func createKey(name string) (err error) {
	dir := filepath.Dir(name)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no folder %s: make it first", dir)
	}
	key, suffix := make([]byte, keySize), make([]byte, 8)
	_, _ = rand.Read(key) // never fails
	_, _ = rand.Read(suffix)
	temp := name + "." + hex.EncodeToString(suffix)
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer os.Remove(temp)
	_, err = f.Write(key)
	if err := errors.Join(err, f.Chmod(0o600), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Link(temp, name); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// treeKey derives the key for the handles of one tree: a handle of one export is not
// valid in another, which may lie on the same file system.
func treeKey(key [keySize]byte, fsid, ino uint64) []byte {
	h := hmac.New(sha256.New, key[:])
	h.Write([]byte("iwarpd nfs handle 2\x00"))
	h.Write(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, fsid), ino))
	return h.Sum(nil)
}
