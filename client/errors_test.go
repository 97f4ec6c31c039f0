package iwarp

import (
	"errors"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// TestErrorCodes checks that each code has an error, and that an unknown one is internal (docs/api.md).
func TestErrorCodes(t *testing.T) {
	for code, name := range ctrlpb.Code_name {
		err := errors.Unwrap(&Error{Code: ctrlpb.Code(code)})
		if internal := err == ErrInternal; err == nil || internal != (code == 0 || name == "CODE_INTERNAL") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := error(&Error{Code: 9999}); !errors.Is(err, ErrInternal) {
		t.Errorf("an unknown code: %v", errors.Unwrap(err))
	}
}
