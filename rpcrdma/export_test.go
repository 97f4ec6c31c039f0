package rpcrdma

import iwarp "github.com/iwarpd/iwarpd/client"

// PoolMR returns the memory in which e serves calls.
func (e *Endpoint) PoolMR() *iwarp.MR { return e.pool.mr }
