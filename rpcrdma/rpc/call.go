package rpc

// Values of RFC 5531 section 9.
const (
	typeCall  = 0
	typeReply = 1

	maxAuth = 400 // bytes of credentials and verifiers
)

// Flavors of credentials.
const (
	AuthNone = 0
	AuthSys  = 1
)

// Auth is a credential or verifier.
type Auth struct {
	Flavor uint32
	Body   []byte
}

// Call is the head of a call, and its arguments.
type Call struct {
	XID, Prog, Vers, Proc uint32
	Cred, Verf            Auth
	Args                  *Reader

	rpcvers uint32
}

// parseCall parses the header of a call. It returns ErrXDR if m is not a call.
func parseCall(m Msg) (*Call, error) {
	r := NewReader(m)
	c := &Call{XID: r.U32(), Args: r}
	if r.U32() != typeCall || r.bad {
		return nil, ErrXDR
	}
	if c.rpcvers = r.U32(); r.bad {
		return nil, ErrXDR
	}
	c.Prog, c.Vers, c.Proc = r.U32(), r.U32(), r.U32()
	c.Cred = Auth{r.U32(), r.Opaque(maxAuth)}
	c.Verf = Auth{r.U32(), r.Opaque(maxAuth)}
	if c.rpcvers == 2 && r.bad {
		return nil, ErrXDR
	}
	return c, nil
}

// Start writes the head of a call; arguments follow.
func (c *Call) Start(w *Writer) {
	w.U32(c.XID, typeCall, 2, c.Prog, c.Vers, c.Proc, c.Cred.Flavor)
	w.Opaque(c.Cred.Body)
	w.U32(c.Verf.Flavor)
	w.Opaque(c.Verf.Body)
}

// MaxGroups is the number of groups that an AUTH_SYS credential has room for.
const MaxGroups = 16

// Sys is the body of an AUTH_SYS credential (RFC 5531 appendix A).
type Sys struct {
	Stamp    uint32
	Machine  string
	UID, GID uint32
	GIDs     []uint32
}

// Auth returns s as a credential.
func (s *Sys) Auth() Auth {
	var w Writer
	w.U32(s.Stamp)
	w.String(s.Machine)
	w.U32(s.UID, s.GID, uint32(len(s.GIDs)))
	w.U32(s.GIDs...)
	return Auth{AuthSys, w.Body}
}

// ParseSys reads an AUTH_SYS credential.
func ParseSys(a Auth) (s Sys, ok bool) {
	if a.Flavor != AuthSys {
		return s, false
	}
	r := NewReader(Msg{Body: a.Body})
	s.Stamp, s.Machine, s.UID, s.GID = r.U32(), r.String(255), r.U32(), r.U32()
	n := r.U32()
	if n > MaxGroups {
		return s, false
	}
	for range n {
		s.GIDs = append(s.GIDs, r.U32())
	}
	return s, !r.bad
}

// Status is the outcome of a call (accept_stat, or a reason for denial).
type Status uint32

// Statuses of accepted calls.
const (
	Success      Status = 0
	ProgUnavail  Status = 1
	ProgMismatch Status = 2
	ProcUnavail  Status = 3
	GarbageArgs  Status = 4
	SystemErr    Status = 5
)

// Reasons for denial, numbered outside of accept_stat.
const (
	RPCMismatch Status = 1<<16 + 0
	AuthError   Status = 1<<16 + 1
)

var statusNames = map[Status]string{
	Success: "SUCCESS", ProgUnavail: "PROG_UNAVAIL", ProgMismatch: "PROG_MISMATCH", ProcUnavail: "PROC_UNAVAIL",
	GarbageArgs: "GARBAGE_ARGS", SystemErr: "SYSTEM_ERR", RPCMismatch: "RPC_MISMATCH", AuthError: "AUTH_ERROR",
}

func (s Status) Error() string { return "rpc: " + statusNames[s] }

// startReply writes the header of a reply. With Success the results follow. low and high are the
// supported versions for a mismatch.
func startReply(w *Writer, xid uint32, s Status, low, high uint32) {
	w.U32(xid, typeReply)
	switch s {
	case RPCMismatch:
		w.U32(1, 0, 2, 2)
	case AuthError:
		w.U32(1, 1, 1) // AUTH_BADCRED
	default:
		w.U32(0, AuthNone, 0, uint32(s))
		if s == ProgMismatch {
			w.U32(low, high)
		}
	}
}

// ParseReply parses the header of a reply and returns a Reader positioned at the results. If the
// call failed, the error is a Status.
func ParseReply(m Msg) (*Reader, error) {
	r := NewReader(m)
	r.U32()
	if r.U32() != typeReply {
		return nil, ErrXDR
	}
	switch r.U32() {
	case 0:
		r.U32()
		r.Opaque(maxAuth)
		s := Status(r.U32())
		if r.bad || s > SystemErr {
			return nil, ErrXDR
		}
		if s != Success {
			return nil, s
		}
		return r, nil
	case 1:
		s := RPCMismatch + Status(r.U32())
		if r.bad || s > AuthError {
			return nil, ErrXDR
		}
		return nil, s
	}
	return nil, ErrXDR
}
