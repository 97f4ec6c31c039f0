package nfs_test

import (
	"os"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.RunApart(m)) }
