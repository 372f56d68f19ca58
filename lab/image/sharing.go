package image

import (
	"fmt"
	"math/rand/v2"
	"runtime"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
)

// Sharing builds count images of random layers of up to mostBytes. Images have
// their lower layers in common with others, some all of them; each has a
// configuration of its own. The same numbers give the same images. They can be
// pulled and unpacked, not run.
func Sharing(seed uint64, count int, mostBytes int64) ([]v1.Image, error) {
	random := rand.New(rand.NewPCG(seed, 3)) //nolint:gosec // it has to be the same each time
	var stacks [][]v1.Layer
	out := make([]v1.Image, count)
	for i := range out {
		var stack []v1.Layer
		if len(stacks) > 0 && random.IntN(4) > 0 {
			below := stacks[random.IntN(len(stacks))]
			stack = append(stack, below[:1+random.IntN(len(below))]...)
		}
		own := 1 + random.IntN(3)
		if len(stack) > 0 && random.IntN(6) == 0 {
			own = 0 // another image of the same layers
		}
		for range own {
			made, err := Random(random.Int64(), 1, 1+random.Int64N(mostBytes))
			if err != nil {
				return nil, err
			}
			layers, err := made.Layers()
			if err != nil {
				return nil, fmt.Errorf("take the layer of random image %d: %w", i, err)
			}
			stack = append(stack, layers...)
		}
		stacks = append(stacks, stack)
		image, err := mutate.AppendLayers(empty.Image, stack...)
		if err != nil {
			return nil, fmt.Errorf("put random image %d together: %w", i, err)
		}
		file, err := image.ConfigFile()
		if err != nil {
			return nil, fmt.Errorf("make the configuration of random image %d: %w", i, err)
		}
		file = file.DeepCopy()
		file.Architecture, file.OS = runtime.GOARCH, "linux" // an import takes no other
		file.Config.Labels = map[string]string{"number": fmt.Sprint(i)}
		if out[i], err = mutate.ConfigFile(image, file); err != nil {
			return nil, fmt.Errorf("set the configuration of random image %d: %w", i, err)
		}
	}
	return out, nil
}
