package rpc

import "encoding/binary"

// AuthGSS is RPCSEC_GSS (RFC 2203, RFC 7861). This package does not implement it, but a transport
// must know which of its messages have to stay whole.
const AuthGSS = 6

// Fields of an RPCSEC_GSS credential (RFC 2203 section 5, RFC 7861 section 2.1).
const (
	gssData        = 0 // the only procedure that is not about the context itself
	gssNone        = 1 // the service that does not change arguments and results
	gssChannelProt = 4
)

// Whole reports whether a call with this credential, and its reply, must not be reduced: RPCSEC_GSS
// with integrity or privacy, or about its context (RFC 8166 section 8.2.2).
func (a Auth) Whole() bool {
	if a.Flavor != AuthGSS {
		return false
	}
	r := NewReader(Msg{Body: a.Body})
	r.U32() // version
	proc := r.U32()
	r.U32() // sequence number
	service := r.U32()
	return r.bad || proc != gssData || service != gssNone && service != gssChannelProt
}

// GSS returns the credential of a call that uses RPCSEC_GSS.
func GSS(m Msg) (cred Auth, ok bool) {
	const flavor = 24 // after XID, type, RPC version, program, its version and procedure
	if len(m.Body) < flavor+4 || binary.BigEndian.Uint32(m.Body[flavor:]) != AuthGSS {
		return cred, false
	}
	c, err := parseCall(m)
	if err != nil {
		return cred, false
	}
	return c.Cred, true
}

// MaxVerifier is the longest body of a verifier, in bytes (RFC 5531 section 8.2). Replies to
// RPCSEC_GSS calls may contain one that long.
const MaxVerifier = maxAuth
