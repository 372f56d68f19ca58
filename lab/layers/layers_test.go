package layers_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"path"
	"strings"
	"testing"

	"github.com/cleave-cri/cleave/lab/layers"
)

// TestLayersHaveOneOfEachKind: over a few seeds, all kinds are there, names are
// below the top folder, and a seed gives the same bytes each time.
func TestLayersHaveOneOfEachKind(t *testing.T) {
	t.Parallel()
	seen := map[string]int{}
	for seed := range uint64(5) {
		made, again := layers.Make(seed, 12), layers.Make(seed, 12)
		if len(made) != 12 {
			t.Fatalf("%d layers, want 12", len(made))
		}
		below := map[string]byte{}
		for i, content := range made {
			if !bytes.Equal(content, again[i]) {
				t.Errorf("seed %d, layer %d: differs the second time", seed, i)
			}
			for r := tar.NewReader(bytes.NewReader(content)); ; {
				h, err := r.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				name := strings.TrimSuffix(h.Name, "/")
				if name != layers.Top && !strings.HasPrefix(name, layers.Top+"/") {
					t.Errorf("%q is outside of %s", name, layers.Top)
				}
				switch base := path.Base(name); {
				case base == ".wh..wh..opq":
					seen["opaque"]++
					continue
				case strings.HasPrefix(base, ".wh."):
					seen["whiteout"]++
					if _, ok := below[path.Join(path.Dir(name), strings.TrimPrefix(base, ".wh."))]; !ok {
						t.Errorf("seed %d, layer %d: %q takes away what is not there", seed, i, name)
					}
					continue
				}
				if kind, ok := below[name]; ok && kind != h.Typeflag {
					seen["changed kind"]++
				}
				below[name] = h.Typeflag
				seen[string(h.Typeflag)]++
				if h.Mode&0o4000 != 0 {
					seen["setuid"]++
				}
				if len(h.PAXRecords) > 0 {
					seen["attribute"]++
				}
			}
		}
	}
	for _, kind := range []string{
		"opaque", "whiteout", "changed kind", "setuid", "attribute", string(tar.TypeReg), string(tar.TypeDir),
		string(tar.TypeSymlink), string(tar.TypeLink), string(tar.TypeChar), string(tar.TypeBlock), string(tar.TypeFifo),
	} {
		if seen[kind] == 0 {
			t.Errorf("no %q among the layers: %v", kind, seen)
		}
	}
}
