package filecopy

import (
	"bytes"
	"encoding/binary"
	"math"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// acl returns an access control list: the owner and user 2000 have the rights 6, the owning group those of group, and
// others none.
func acl(group uint16) []byte {
	const none = math.MaxUint32
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{0x01, 6, none}, {0x02, 6, 2000}, {0x04, group, none}, {0x10, 6, none}, {0x20, 0, none}} {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return b
}

// TestACL checks that a file that is replaced keeps its access control list, or gets none if it had none or if it is to
// have the permissions of the source: in the mode of a file with such a list, the bits of the group are its mask.
func TestACL(t *testing.T) {
	for _, tt := range []struct {
		name          string
		old, inherits []byte
		preserve      bool
		mode          uint32
		want          []byte
	}{
		{"kept", acl(0), nil, false, 0o660, acl(0)},
		{"instead of that of the folder", acl(0), acl(4), false, 0o660, acl(0)},
		{"not that of the folder", nil, acl(4), false, 0o640, nil},
		{"not with the permissions of the source", acl(0), acl(4), true, 0o604, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			f := filepath.Join(dir, "f")
			testenv.WriteFile(t, f, nil, 0o640)
			testenv.Chmod(t, f, 0o640)
			for _, a := range []struct {
				file, attr string
				list       []byte
			}{{f, aclAttr, tt.old}, {dir, "system.posix_acl_default", tt.inherits}} {
				if a.list == nil {
					continue
				}
				if err := unix.Setxattr(a.file, a.attr, a.list, 0); err != nil {
					testenv.Skip(t, "no ACLs on this file system: %v", err)
				}
			}
			in, err := openStore(t, dir).Create("f", 0, Options{Attrs: Attrs{Mode: 0o604}, Preserve: tt.preserve})
			if err == nil {
				err = in.Commit()
			}
			var st unix.Stat_t
			if err := unix.Stat(f, &st); err != nil {
				t.Fatal(err)
			}
			if got := ACL(f); err != nil || !bytes.Equal(got, tt.want) || st.Mode&0o7777 != tt.mode {
				t.Errorf("%v; mode %#o, list %x; want %#o, %x", err, st.Mode&0o7777, got, tt.mode, tt.want)
			}
		})
	}
}
