#!/bin/sh
# Makes store_xdr.go from store.x.
set -eu
version=$(go list -m -f '{{.Version}}' github.com/buildbarn/go-xdr)
module=$(go list -m -f '{{.Dir}}' github.com/buildbarn/go-xdr)
out=$PWD/store_xdr.go
in=$PWD
cd "$(mktemp -d)"
go run "github.com/buildbarn/go-xdr/cmd/xdr_compiler@$version" -I "$module" -I "$in" store.x "$out"
gofmt -w "$out"
