package nfs

import (
	"context"
	"math"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpcgen"
)

var _ nfsv3.NfsProgram = (*Server)(nil)

// NfsV3Nfsproc3Null does nothing.
func (s *Server) NfsV3Nfsproc3Null(context.Context) error { return nil }

// NfsV3Nfsproc3Getattr implements GETATTR.
func (s *Server) NfsV3Nfsproc3Getattr(_ context.Context, a *nfsv3.Getattr3args) (nfsv3.Getattr3res, error) {
	o, err := s.object(a.Object, unix.O_PATH)
	if err != nil {
		return &nfsv3.Getattr3res_default{Status: status(err)}, nil
	}
	defer o.close()
	return &nfsv3.Getattr3res_NFS3_OK{Resok: nfsv3.Getattr3resok{ObjAttributes: fattr(&o.st)}}, nil
}

// NfsV3Nfsproc3Setattr implements SETATTR.
func (s *Server) NfsV3Nfsproc3Setattr(ctx context.Context, a *nfsv3.Setattr3args) (nfsv3.Setattr3res, error) {
	fail := func(st nfsv3.Nfsstat3, w nfsv3.WccData) (nfsv3.Setattr3res, error) {
		return &nfsv3.Setattr3res_default{Status: st, Resfail: nfsv3.Setattr3resfail{ObjWcc: w}}, nil
	}
	if s.cfg.ReadOnly {
		return fail(nfsv3.NFS3ERR_ROFS, noWcc())
	}
	o, err := s.object(a.Object, unix.O_PATH)
	if err != nil {
		return fail(status(err), noWcc())
	}
	defer o.close()
	unlock := sync.OnceFunc(s.lock(&o))
	defer unlock()
	if err := s.refresh(&o); err != nil {
		return fail(status(err), noWcc())
	}
	if g, ok := a.Guard.(*nfsv3.Sattrguard3_TRUE); ok && g.ObjCtime != nfstime(o.st.Ctim) {
		return fail(nfsv3.NFS3ERR_NOT_SYNC, s.wcc(&o))
	}
	err = s.setattr(&exchangeOf(ctx).cred, &o, &a.NewAttributes)
	w := s.wcc(&o)
	unlock()
	if err == nil {
		err = s.syncObject(&o)
	}
	if err != nil {
		return fail(status(err), w)
	}
	return &nfsv3.Setattr3res_NFS3_OK{Resok: nfsv3.Setattr3resok{ObjWcc: w}}, nil
}

// Bits of ACCESS (RFC 1813 section 3.3.4).
const (
	accessRead    = 0x01
	accessLookup  = 0x02
	accessModify  = 0x04
	accessExtend  = 0x08
	accessDelete  = 0x10
	accessExecute = 0x20
)

// NfsV3Nfsproc3Access implements ACCESS.
func (s *Server) NfsV3Nfsproc3Access(ctx context.Context, a *nfsv3.Access3args) (nfsv3.Access3res, error) {
	o, err := s.object(a.Object, unix.O_PATH)
	if err != nil {
		return &nfsv3.Access3res_default{Status: status(err), Resfail: nfsv3.Access3resfail{ObjAttributes: noAttr}}, nil
	}
	defer o.close()
	has := s.rights(&exchangeOf(ctx).cred, &o, mayRead|mayWrite|mayExec)
	var got uint32
	if has&mayRead != 0 {
		got |= accessRead
	}
	if has&mayWrite != 0 && !s.cfg.ReadOnly {
		got |= accessModify | accessExtend
		if o.dir() {
			got |= accessDelete
		}
	}
	if has&mayExec != 0 {
		if o.dir() {
			got |= accessLookup
		} else {
			got |= accessExecute
		}
	}
	return &nfsv3.Access3res_NFS3_OK{Resok: nfsv3.Access3resok{ObjAttributes: s.post(o.fd), Access: got & a.Access}}, nil
}

// NfsV3Nfsproc3Readlink implements READLINK.
func (s *Server) NfsV3Nfsproc3Readlink(ctx context.Context, a *nfsv3.Readlink3args) (nfsv3.Readlink3res, error) {
	o, err := s.object(a.Symlink, unix.O_PATH)
	if err != nil {
		return &nfsv3.Readlink3res_default{Status: status(err), Resfail: nfsv3.Readlink3resfail{SymlinkAttributes: noAttr}}, nil
	}
	defer o.close()
	b := make([]byte, 4096)
	n, err := unix.Readlinkat(o.fd, "", b)
	if err != nil {
		if o.st.Mode&unix.S_IFMT != unix.S_IFLNK {
			err = unix.EINVAL
		}
		return &nfsv3.Readlink3res_default{Status: status(err), Resfail: nfsv3.Readlink3resfail{SymlinkAttributes: s.post(o.fd)}}, nil
	}
	rpcgen.Item(ctx, b[:n])
	return &nfsv3.Readlink3res_NFS3_OK{Resok: nfsv3.Readlink3resok{SymlinkAttributes: s.post(o.fd), Data: b[:n]}}, nil
}

// readable reports whether c may read the data of a file, which includes files that c may execute
// or owns (RFC 1813 section 4.4).
func (s *Server) readable(c *cred, o *object) bool {
	return c.uid == o.st.Uid || s.rights(c, o, mayRead|mayExec) != 0
}

// pread fills b from a file, or reads to its end.
func pread(fd int, b []byte, off int64) (got int, err error) {
	for got < len(b) {
		n, err := unix.Pread(fd, b[got:], off+int64(got))
		if err == nil && n == 0 {
			break
		}
		if err != nil && err != unix.EINTR {
			return got, err
		}
		got += max(n, 0)
	}
	return got, nil
}

// NfsV3Nfsproc3Read implements READ. The data is read directly into memory from which the transport
// sends it.
func (s *Server) NfsV3Nfsproc3Read(ctx context.Context, a *nfsv3.Read3args) (nfsv3.Read3res, error) {
	fail := func(err error, at nfsv3.PostOpAttr) (nfsv3.Read3res, error) {
		return &nfsv3.Read3res_default{Status: status(err), Resfail: nfsv3.Read3resfail{FileAttributes: at}}, nil
	}
	o, err := s.object(a.File, unix.O_RDONLY)
	if err != nil {
		return fail(err, noAttr)
	}
	defer o.close()
	x := exchangeOf(ctx)
	switch o.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		return fail(unix.EISDIR, s.post(o.fd))
	default:
		return fail(unix.EINVAL, s.post(o.fd))
	}
	if !s.readable(&x.cred, &o) {
		return fail(unix.EACCES, s.post(o.fd))
	}
	// The file may change in the meantime. A client takes the size from the reply, so the end must be
	// that of this size: otherwise the client would cache zeros where there is data.
	var b []byte
	for got, unchanged, off := 0, 0, int64(min(a.Offset, math.MaxInt64)); ; {
		n := int(min(int64(min(a.Count, MaxIO)), max(o.st.Size-off, 0)))
		if n > 0 && b == nil {
			if b, err = x.buffer(n); err != nil {
				return fail(unix.ENOMEM, s.post(o.fd))
			}
		}
		if got, err = pread(o.fd, b[:min(n, len(b))], off); err != nil {
			return fail(err, s.post(o.fd))
		}
		before := o.st.Ctim
		if err := s.refresh(&o); err != nil {
			return fail(err, noAttr)
		}
		if o.st.Ctim == before {
			unchanged++ // as far as the kernel's clock tells, which may stand still for some ms
		}
		if got > 0 || a.Count == 0 || off >= o.st.Size || unchanged == 10 { // a file of FUSE may have less data than its size
			b = b[:got]
			break
		}
	}
	ok := nfsv3.Read3resok{
		FileAttributes: &nfsv3.PostOpAttr_TRUE{Attributes: fattr(&o.st)},
		Count:          uint32(len(b)), Data: b,
		Eof: a.Offset+uint64(len(b)) >= uint64(o.st.Size) || len(b) == 0 && a.Count > 0,
	}
	if len(b) > 0 {
		rpcgen.Item(ctx, b)
	}
	return &nfsv3.Read3res_NFS3_OK{Resok: ok}, nil
}

// NfsV3Nfsproc3Write implements WRITE.
func (s *Server) NfsV3Nfsproc3Write(ctx context.Context, a *nfsv3.Write3args) (nfsv3.Write3res, error) {
	fail := func(err error, w nfsv3.WccData) (nfsv3.Write3res, error) {
		return &nfsv3.Write3res_default{Status: status(err), Resfail: nfsv3.Write3resfail{FileWcc: w}}, nil
	}
	if s.cfg.ReadOnly {
		return fail(unix.EROFS, noWcc())
	}
	o, err := s.object(a.File, unix.O_WRONLY)
	if err != nil {
		return fail(err, noWcc())
	}
	defer o.close()
	x := exchangeOf(ctx)
	c := &x.cred
	unlock := sync.OnceFunc(s.lock(&o))
	defer unlock()
	if err := s.refresh(&o); err != nil {
		return fail(err, noWcc())
	}
	switch {
	case o.st.Mode&unix.S_IFMT != unix.S_IFREG:
		err = unix.EINVAL
	case c.uid != o.st.Uid && !s.may(c, &o, mayWrite):
		err = unix.EACCES
	case a.Offset > math.MaxInt64-uint64(len(a.Data)):
		err = unix.EFBIG
	}
	if err != nil {
		return fail(err, s.wcc(&o))
	}
	verf := s.verifier() // read first: if the data is lost even before the reply, COMMIT has another one
	data := a.Data[:min(len(a.Data), int(a.Count))]
	done := 0
	err = s.as(c, func() error { // with no more rights than the caller has
		for done < len(data) {
			n, err := unix.Pwrite(o.fd, data[done:], int64(a.Offset)+int64(done))
			if err != nil && err != unix.EINTR {
				return err
			}
			done += max(n, 0)
		}
		return nil
	})
	if err != nil && done == 0 {
		return fail(err, s.wcc(&o))
	}
	keepNoSetID(c, o.fd, &o.st)
	ok := nfsv3.Write3resok{Count: uint32(done), Committed: a.Stable, FileWcc: s.wcc(&o), Verf: verf}
	unlock() // the disk may be slow
	if a.Stable == nfsv3.UNSTABLE && !s.cfg.Async && !s.keep(x.peer, a.File.Data, &o) {
		if s.commitOne(x.peer); !s.keep(x.peer, a.File.Data, &o) {
			ok.Committed = nfsv3.FILE_SYNC
		}
	}
	err = nil
	switch {
	case s.cfg.Async:
	case ok.Committed == nfsv3.FILE_SYNC:
		err = s.lost(unix.Fsync(o.fd))
	case ok.Committed == nfsv3.DATA_SYNC:
		err = s.lost(unix.Fdatasync(o.fd))
	}
	if err != nil {
		return fail(err, ok.FileWcc)
	}
	return &nfsv3.Write3res_NFS3_OK{Resok: ok}, nil
}

// NfsV3Nfsproc3Commit implements COMMIT. It commits the whole file.
func (s *Server) NfsV3Nfsproc3Commit(_ context.Context, a *nfsv3.Commit3args) (nfsv3.Commit3res, error) {
	o, err := s.object(a.File, unix.O_PATH)
	if err != nil {
		return &nfsv3.Commit3res_default{Status: status(err), Resfail: nfsv3.Commit3resfail{FileWcc: noWcc()}}, nil
	}
	defer o.close()
	kept, err := s.commitKept(keyOf(a.File.Data))
	if !kept { // nothing was written, or another COMMIT is in progress
		err = s.syncObject(&o)
	}
	if err != nil {
		return &nfsv3.Commit3res_default{Status: status(err), Resfail: nfsv3.Commit3resfail{FileWcc: s.wcc(&o)}}, nil
	}
	// The verifier is read last, so that data whose loss another request has learned of is not reported as safe.
	return &nfsv3.Commit3res_NFS3_OK{Resok: nfsv3.Commit3resok{FileWcc: s.wcc(&o), Verf: s.verifier()}}, nil
}

// NfsV3Nfsproc3Fsstat implements FSSTAT.
func (s *Server) NfsV3Nfsproc3Fsstat(ctx context.Context, a *nfsv3.Fsstat3args) (nfsv3.Fsstat3res, error) {
	var f unix.Statfs_t
	o, err := s.object(a.Fsroot, unix.O_PATH)
	if err == nil {
		defer o.close()
		err = unix.Fstatfs(o.fd, &f)
	}
	if err != nil {
		return &nfsv3.Fsstat3res_default{Status: status(err), Resfail: nfsv3.Fsstat3resfail{ObjAttributes: noAttr}}, nil
	}
	b := uint64(f.Frsize)
	if b == 0 {
		b = uint64(f.Bsize)
	}
	return &nfsv3.Fsstat3res_NFS3_OK{Resok: nfsv3.Fsstat3resok{
		ObjAttributes: s.post(o.fd), Tbytes: f.Blocks * b, Fbytes: f.Bfree * b, Abytes: f.Bavail * b, Tfiles: f.Files, Ffiles: f.Ffree, Afiles: f.Ffree,
	}}, nil
}

// Properties of FSINFO: links, symbolic links, homogeneous, times can be set.
const fsProperties = 0x01 | 0x02 | 0x08 | 0x10

// NfsV3Nfsproc3Fsinfo implements FSINFO.
func (s *Server) NfsV3Nfsproc3Fsinfo(_ context.Context, a *nfsv3.Fsinfo3args) (nfsv3.Fsinfo3res, error) {
	o, err := s.object(a.Fsroot, unix.O_PATH)
	if err != nil {
		return &nfsv3.Fsinfo3res_default{Status: status(err), Resfail: nfsv3.Fsinfo3resfail{ObjAttributes: noAttr}}, nil
	}
	defer o.close()
	return &nfsv3.Fsinfo3res_NFS3_OK{Resok: nfsv3.Fsinfo3resok{
		ObjAttributes: s.post(o.fd), Rtmax: MaxIO, Rtpref: MaxIO, Rtmult: 4096, Wtmax: MaxIO, Wtpref: MaxIO, Wtmult: 4096, Dtpref: maxDir,
		Maxfilesize: math.MaxInt64, TimeDelta: nfsv3.Nfstime3{Nseconds: 1}, Properties: fsProperties,
	}}, nil
}

// NfsV3Nfsproc3Pathconf implements PATHCONF.
func (s *Server) NfsV3Nfsproc3Pathconf(_ context.Context, a *nfsv3.Pathconf3args) (nfsv3.Pathconf3res, error) {
	o, err := s.object(a.Object, unix.O_PATH)
	if err != nil {
		return &nfsv3.Pathconf3res_default{Status: status(err), Resfail: nfsv3.Pathconf3resfail{ObjAttributes: noAttr}}, nil
	}
	defer o.close()
	return &nfsv3.Pathconf3res_NFS3_OK{Resok: nfsv3.Pathconf3resok{
		ObjAttributes: s.post(o.fd), Linkmax: 32000, NameMax: maxName, NoTrunc: true, ChownRestricted: true, CasePreserving: true,
	}}, nil
}
