package arch

import (
	"go/ast"
	"go/token"
	"strings"
	"testing"
)

// Limits that keep a type readable. A type that reaches one has several tasks:
// give one of them a type of its own, as tcp.Conn has sndSpace and rcvSpace. An
// embedded struct counts as one field, and its methods are not the outer type's.
const (
	maxFields  = 40
	maxMethods = 99
)

// bounds are limits of types that differ: dataplane.worker and ctrl.session once had
// everything, and the control block of an association is one state that every rule of
// its RFC looks at.
var bounds = map[string]struct{ fields, methods int }{
	"dataplane.worker": {35, 99},
	"ctrl.session":     {20, 67},
	"sctp.Assoc":       {26, 115},
}

// generated folders hold types that programs wrote, or that mirror a format.
var generated = []string{"ctrl/ctrlpb", "rpcrdma/nfs", "rpcrdma/rpcgen"}

// size is what a type has.
type size struct {
	fields, methods int
	file            string
}

// countFields returns how many fields a struct has, with embedded ones.
func countFields(s *ast.StructType) int {
	n := 0
	for _, f := range s.Fields.List {
		n += max(1, len(f.Names))
	}
	return n
}

// receiver returns the name of the type that a method belongs to.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	t := d.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

// measure adds the types and methods that a file declares.
func measure(f file, sizes map[string]*size) {
	of := func(name string) *size {
		name = f.folder + "." + name
		if sizes[name] == nil {
			sizes[name] = &size{}
		}
		return sizes[name]
	}
	for _, d := range f.syntax.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if name := receiver(d); name != "" {
				of(name).methods++
			}
		case *ast.GenDecl:
			if d.Tok != token.TYPE {
				continue
			}
			for _, s := range d.Specs {
				spec := s.(*ast.TypeSpec)
				if st, ok := spec.Type.(*ast.StructType); ok {
					z := of(spec.Name.Name)
					z.fields, z.file = countFields(st), f.name
				}
			}
		}
	}
}

// measured reports whether the types of f are under the limits: those of tests,
// examples and generated code are not.
func measured(f file) bool {
	return !f.test && !helper(f.folder) && !anyUnder(f.folder, generated) && !strings.HasSuffix(f.name, ".pb.go")
}

func TestTypesAreSmall(t *testing.T) {
	sizes := map[string]*size{}
	for _, f := range parse(t) {
		if measured(f) {
			measure(f, sizes)
		}
	}
	for name := range bounds {
		if sizes[name] == nil {
			t.Errorf("there is no type %s: take it out of bounds", name)
		}
	}
	for name, z := range sizes {
		fields, methods := maxFields, maxMethods
		if b, ok := bounds[name]; ok {
			fields, methods = b.fields, b.methods
		}
		if z.fields > fields {
			t.Errorf("%s (%s) has %d fields; at most %d", name, z.file, z.fields, fields)
		}
		if z.methods > methods {
			t.Errorf("%s (%s) has %d methods; at most %d", name, z.file, z.methods, methods)
		}
		if z.fields > 30 || z.methods > 80 {
			t.Logf("%s: %d fields, %d methods", name, z.fields, z.methods)
		}
	}
}
