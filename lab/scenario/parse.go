package scenario

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/config/strict"
	"github.com/cleave-cri/cleave/engine"
)

// Limits of a file, so that a mistake in it does not take the machine down.
const (
	maxFileBytes = 1 << 20
	maxPods      = 2000
	maxLasts     = 30 * 24 * time.Hour
	maxThreshold = 40 // bytes of the text of a threshold
)

// Load reads a file.
func Load(file string) (*Scenario, error) {
	// Opening a named pipe would wait for a writer without O_NONBLOCK (fifo(7)).
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read scenario: %w", err)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("read scenario %s: %w", file, err)
	}
	return Parse(file, data)
}

// Parse reads a scenario from data; name stands for the file in messages.
// Whatever is wrong is an error of type strict.Faults, which has all faults.
func Parse(name string, data []byte) (*Scenario, error) {
	p := &parser{Parser: strict.Parser{File: name}, places: map[string]*yaml.Node{}}
	s := p.parse(data)
	if len(p.Faults) > 0 {
		return nil, p.Faults.Sorted()
	}
	return s, nil
}

type parser struct {
	strict.Parser
	// places is where names were used that are checked when all is read.
	places map[string]*yaml.Node
	uses   []use
	// tooManyPods says that there are more than maxPods; the rest is not made.
	tooManyPods bool
}

// use is a name of something else in the file.
type use struct {
	node       *yaml.Node
	path, kind string
	name       string
}

// keys are those of a mapping, in the order in which messages name them.
type keys []key

type key struct {
	name string
	read func(n *yaml.Node, path string)
}

func (p *parser) parse(data []byte) *Scenario {
	start := &yaml.Node{Line: 1, Column: 1}
	if len(data) > maxFileBytes {
		p.Fault(start, "", "the file is larger than %s", strict.FormatBytes(maxFileBytes))
		return nil
	}
	root := p.Document(data)
	if len(p.Faults) > 0 {
		return nil
	}
	if root == nil || strict.IsNull(root) {
		p.Fault(start, "", "the file is empty; write version: %d, and what docs/examples has", Version)
		return nil
	}
	s := &Scenario{Kubelet: defaults(), Expect: map[string]Expect{}}
	version := 0
	p.keys(root, "", keys{
		{"version", p.integer(&version)},
		{"title", p.text(&s.Title)},
		{"lasts", p.duration(&s.Lasts)},
		{"filesystems", p.filesystems(s)},
		{"layout", p.layout(&s.Layout)},
		{"images", p.images(s)},
		{"pods", p.pods(s)},
		{"host", p.host(s)},
		{"faults", p.faults(s)},
		{"kubelet", p.kubelet(&s.Kubelet)},
		{"cleave", p.cleave(&s.Cleave)},
		{"pullBytesPerSecond", p.bytes(&s.PullBytesPerSecond)},
		{"expect", p.expect(s)},
	})
	if len(p.Faults) == 0 && version != Version {
		p.Fault(root, "version", "is %d, but this cleave knows version %d only", version, Version)
	}
	if bad := slices.ContainsFunc(p.Faults, func(f strict.Fault) bool { return f.Key == "lasts" }); !bad && (s.Lasts <= 0 || s.Lasts > maxLasts) {
		p.at(root, "lasts", "must be from 1s to %s", maxLasts)
	}
	if len(s.Filesystems) == 0 {
		p.at(root, "filesystems", "there must be one")
	}
	if p.tooManyPods {
		p.at(root, "pods", "are more than %d", maxPods)
	}
	p.layoutDefaults(s)
	p.resolve(s)
	return s
}

// at is a fault at a key of the file's top, if it is there.
func (p *parser) at(root *yaml.Node, key, format string, args ...any) {
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value == key {
			p.Fault(root.Content[i+1], key, format, args...)
			return
		}
	}
	p.Fault(root, key, format, args...)
}

// defaults are the kubelet's own.
func defaults() Kubelet {
	list, err := engine.Parse(engine.Settings{Hard: map[string]string{
		"nodefs.available": "10%", "nodefs.inodesFree": "5%", "imagefs.available": "15%", "imagefs.inodesFree": "5%",
	}})
	if err != nil {
		list = nil // it is a constant text; a test reads it
	}
	return Kubelet{
		Thresholds: list, PressureTransitionPeriod: 5 * time.Minute, ImageGCHighPercent: 85, ImageGCLowPercent: 80,
		ImageMinimumAge: 2 * time.Minute, ContainerLogMaxSizeBytes: 10 << 20, ContainerLogMaxFiles: 5,
	}
}

// keys reads a mapping whose keys are known.
func (p *parser) keys(n *yaml.Node, path string, known keys) {
	what := "this"
	if path == "" {
		what = "the file"
	}
	p.Keys(n, path, what, func(key, value *yaml.Node, path string) {
		for _, k := range known {
			if k.name == key.Value {
				k.read(value, path)
				return
			}
		}
		names := make([]string, len(known))
		for i, k := range known {
			names[i] = k.name
		}
		if best := strict.Closest(key.Value, names); best != "" {
			p.Fault(key, path, "unknown key; did you mean %q?", best)
			return
		}
		p.Fault(key, path, "unknown key; there are %s", strings.Join(names, ", "))
	})
}

// scalar reads one value by read, and checks it.
func scalar[T any](p *parser, to *T, read func(*yaml.Node) (T, error), check func(T) error) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		switch {
		case !p.Plain(n, path):
		case n.Kind != yaml.ScalarNode:
			p.Fault(n, path, "must be one value, not %s", strict.KindOf(n))
		case strict.IsNull(n):
			p.Fault(n, path, "has no value; leave the key out")
		default:
			v, err := read(n)
			if err == nil && check != nil {
				err = check(v)
			}
			if err != nil {
				p.Fault(n, path, "%s", err)
				return
			}
			*to = v
		}
	}
}

func notNegative[T int | int64 | time.Duration](v T) error {
	if v < 0 {
		return errors.New("is negative")
	}
	return nil
}

func (p *parser) text(to *string) func(*yaml.Node, string) { return scalar(p, to, strict.Text, nil) }

// oneOf is one of some words.
func (p *parser) oneOf(to *string, words ...string) func(*yaml.Node, string) {
	return scalar(p, to, strict.Text, func(v string) error {
		if !slices.Contains(words, v) {
			return fmt.Errorf("%s is none of %s", strict.Shown(v), strings.Join(words, ", "))
		}
		return nil
	})
}

func (p *parser) boolean(to *bool) func(*yaml.Node, string) { return scalar(p, to, strict.Bool, nil) }
func (p *parser) integer(to *int) func(*yaml.Node, string) {
	return scalar(p, to, strict.Int, notNegative[int])
}
func (p *parser) bytes(to *int64) func(*yaml.Node, string) {
	return scalar(p, to, strict.Bytes, notNegative[int64])
}
func (p *parser) duration(to *time.Duration) func(*yaml.Node, string) {
	return scalar(p, to, strict.Duration, notNegative[time.Duration])
}

// optional is a value of which it matters whether it is given.
func optional[T any](to **T, read func(*T) func(*yaml.Node, string)) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		v := new(T)
		read(v)(n, path)
		*to = v
	}
}

// goodName says whether a key is fit to name something.
func (p *parser) goodName(n *yaml.Node, path string) bool {
	s := n.Value
	if s == "" || len(s) > 253 || strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-._/:@", r)
	}) {
		p.Fault(n, path, "%s is no name: letters, digits and - . _ / : @", strict.Shown(s))
		return false
	}
	// The lab makes folders by names.
	for part := range strings.SplitSeq(s, "/") {
		if part == "" || part == "." || part == ".." {
			p.Fault(n, path, "%s is no name: between slashes there must be something, and neither . nor ..", strict.Shown(s))
			return false
		}
	}
	return true
}

// named reads a mapping from names to things.
func (p *parser) named(each func(name *yaml.Node, n *yaml.Node, path string)) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		p.Keys(n, path, "this", func(key, value *yaml.Node, path string) {
			if p.goodName(key, path) {
				each(key, value, path)
			}
		})
	}
}

// list reads a list.
func (p *parser) list(each func(n *yaml.Node, path string)) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		switch {
		case !p.Plain(n, path):
		case n.Kind != yaml.SequenceNode:
			p.Fault(n, path, "must be a list, not %s", strict.KindOf(n))
		default:
			for i, element := range n.Content {
				each(element, fmt.Sprintf("%s[%d]", path, i))
			}
		}
	}
}

// names reads a list of names of things of a kind.
func (p *parser) names(to *[]string, kind string) func(*yaml.Node, string) {
	return p.list(func(n *yaml.Node, path string) {
		var name string
		before := len(p.Faults)
		p.text(&name)(n, path)
		if len(p.Faults) > before {
			return
		}
		if slices.Contains(*to, name) {
			p.Fault(n, path, "%s is listed twice", strict.Shown(name))
			return
		}
		*to = append(*to, name)
		p.use(n, path, kind, name)
	})
}

func (p *parser) use(n *yaml.Node, path, kind, name string) {
	p.uses = append(p.uses, use{node: n, path: path, kind: kind, name: name})
}

// reference reads the name of a thing of a kind.
func (p *parser) reference(to *string, kind string) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		before := len(p.Faults)
		if p.text(to)(n, path); len(p.Faults) == before {
			p.use(n, path, kind, *to)
		}
	}
}

func (p *parser) filesystems(s *Scenario) func(*yaml.Node, string) {
	return p.named(func(name, n *yaml.Node, path string) {
		f := Filesystem{Name: name.Value}
		p.keys(n, path, keys{
			{"size", p.bytes(&f.SizeBytes)},
			{"inodes", p.bytes(&f.Inodes)},
			{"used", p.bytes(&f.UsedBytes)},
			{"usedInodes", p.bytes(&f.UsedInodes)},
			{"freesAfter", p.duration(&f.FreesAfter)},
			{"type", p.oneOf(&f.Type, "ext4", "xfs", "btrfs")},
		})
		switch {
		case f.SizeBytes == 0:
			p.Fault(n, path, "has no size")
		case f.SizeBytes > math.MaxInt64/16:
			p.Fault(n, path, "is larger than any disk")
		case f.UsedBytes > f.SizeBytes || f.Inodes > 0 && f.UsedInodes > f.Inodes:
			p.Fault(n, path, "uses more than it has")
		}
		s.Filesystems = append(s.Filesystems, f)
	})
}

func (p *parser) layout(l *Layout) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		p.keys(n, path, keys{
			{"nodefs", p.reference(&l.NodeFS, "filesystem")},
			{"imagefs", p.reference(&l.ImageFS, "filesystem")},
			{"containerfs", p.reference(&l.ContainerFS, "filesystem")},
		})
	}
}

// layoutDefaults: all is on the first filesystem; containers are with images if
// only those are named.
func (p *parser) layoutDefaults(s *Scenario) {
	if len(s.Filesystems) == 0 {
		return
	}
	if s.Layout.NodeFS == "" {
		s.Layout.NodeFS = s.Filesystems[0].Name
	}
	if s.Layout.ImageFS == "" {
		s.Layout.ImageFS = s.Layout.NodeFS
	}
	if s.Layout.ContainerFS == "" {
		s.Layout.ContainerFS = s.Layout.ImageFS
	}
}

func (p *parser) images(s *Scenario) func(*yaml.Node, string) {
	return p.named(func(name, n *yaml.Node, path string) {
		i := Image{Name: name.Value, OnNode: true}
		p.keys(n, path, keys{
			{"layers", p.named(func(name, n *yaml.Node, path string) {
				l := Layer{Name: name.Value}
				if n.Kind == yaml.MappingNode {
					p.keys(n, path, keys{{"size", p.bytes(&l.Bytes)}, {"inodes", p.bytes(&l.Inodes)}})
				} else {
					p.bytes(&l.Bytes)(n, path)
				}
				for _, other := range s.Images {
					for _, o := range other.Layers {
						if o.Name == l.Name && o != l {
							p.Fault(n, path, "is of another size than in image %s; layers with one name are one layer", other.Name)
						}
					}
				}
				i.Layers = append(i.Layers, l)
			})},
			{"reported", p.bytes(&i.ReportedBytes)},
			{"pinned", p.boolean(&i.Pinned)},
			{"onNode", p.boolean(&i.OnNode)},
			{"unusedFor", p.duration(&i.UnusedFor)},
		})
		s.Images = append(s.Images, i)
	})
}

func (p *parser) pods(s *Scenario) func(*yaml.Node, string) {
	return p.named(func(name, n *yaml.Node, path string) {
		pod := Pod{Name: name.Value, Namespace: "default"}
		count, priority := 1, 0
		p.keys(n, path, keys{
			{"count", p.integer(&count)},
			{"namespace", p.text(&pod.Namespace)},
			{"priority", scalar(p, &priority, strict.Int, func(v int) error {
				if v < math.MinInt32 || v > math.MaxInt32 {
					return errors.New("is no priority: it must fit 32 bits")
				}
				return nil
			})},
			{"static", p.boolean(&pod.Static)},
			{"owner", p.text(&pod.Owner)},
			{"anewAfter", optional(&pod.AnewAfter, p.duration)},
			{"grace", optional(&pod.Grace, p.duration)},
			{"starts", p.duration(&pod.Starts)},
			{"podLevelMemory", p.bytes(&pod.PodLevelMemoryBytes)},
			{"volumes", p.volumes(&pod)},
			{"containers", p.containers(&pod)},
		})
		pod.Priority = int32(priority)
		if len(pod.Containers) == 0 {
			p.Fault(n, path, "has no containers")
		}
		if pod.AnewAfter != nil && pod.Owner == "" {
			p.Fault(n, path, "has anewAfter but no owner; nobody would make it anew")
		}
		if count < 1 || count > maxPods {
			p.Fault(n, path, "count must be from 1 to %d", maxPods)
			return
		}
		if len(s.Pods)+count > maxPods { // before they are made
			p.tooManyPods = true
			return
		}
		if count == 1 {
			s.Pods = append(s.Pods, pod)
			return
		}
		for i := range count { // of many each has a number
			one := pod
			one.Name = fmt.Sprintf("%s-%d", pod.Name, i+1)
			s.Pods = append(s.Pods, one)
		}
	})
}

func (p *parser) volumes(pod *Pod) func(*yaml.Node, string) {
	kinds := []engine.VolumeKind{engine.EmptyDirDisk, engine.HostPath}
	return p.named(func(name, n *yaml.Node, path string) {
		v := Volume{Name: name.Value, Kind: engine.EmptyDirDisk}
		p.keys(n, path, keys{
			{"kind", scalar(p, (*string)(&v.Kind), strict.Text, func(s string) error {
				if !slices.Contains(kinds, engine.VolumeKind(s)) {
					return fmt.Errorf("%s is none of emptyDir, hostPath", strict.Shown(s))
				}
				return nil
			})},
			{"sizeLimit", p.bytes(&v.SizeLimitBytes)},
		})
		pod.Volumes = append(pod.Volumes, v)
	})
}

func (p *parser) containers(pod *Pod) func(*yaml.Node, string) {
	return p.named(func(name, n *yaml.Node, path string) {
		c := Container{Name: name.Value}
		p.keys(n, path, keys{
			{"image", p.reference(&c.Image, "image")},
			{"request", optional(&c.RequestBytes, p.bytes)},
			{"limit", optional(&c.LimitBytes, p.bytes)},
			{"exitsAfter", p.duration(&c.ExitsAfter)},
			{"restartsAfter", optional(&c.RestartsAfter, p.duration)},
			{"writes", p.list(func(n *yaml.Node, path string) {
				w := p.write(n, path, pod)
				c.Writes = append(c.Writes, w)
			})},
		})
		if c.Image == "" {
			p.Fault(n, path, "has no image")
		}
		if c.RestartsAfter != nil && c.ExitsAfter == 0 {
			p.Fault(n, path, "restarts but never exits; give exitsAfter")
		}
		pod.Containers = append(pod.Containers, c)
	})
}

// write reads a stream of writes; pod is nil for a process of the host.
func (p *parser) write(n *yaml.Node, path string, pod *Pod) Write {
	var w Write
	known := keys{
		{"atOnce", p.bytes(&w.AtOnceBytes)},
		{"atOnceInodes", p.bytes(&w.AtOnceInodes)},
		{"bytesPerSecond", p.bytes(&w.BytesPerSecond)},
		{"inodesPerSecond", p.bytes(&w.InodesPerSecond)},
		{"from", p.duration(&w.From)},
		{"until", p.duration(&w.Until)},
		{"atMost", p.bytes(&w.AtMostBytes)},
		{"unlinksAfter", optional(&w.UnlinksAfter, p.duration)},
	}
	if pod != nil {
		known = append(keys{{"to", p.text(&w.To)}}, known...)
	}
	p.keys(n, path, known)
	switch {
	case w.Until > 0 && w.Until <= w.From:
		p.Fault(n, path, "until must be after from")
	case w.AtOnceBytes == 0 && w.AtOnceInodes == 0 && w.BytesPerSecond == 0 && w.InodesPerSecond == 0:
		p.Fault(n, path, "writes nothing: give bytesPerSecond, inodesPerSecond, atOnce or atOnceInodes")
	}
	if pod == nil {
		return w
	}
	volume, isVolume := strings.CutPrefix(w.To, ToVolume)
	switch {
	case w.To == ToLayer:
	case w.To == ToLog && w.UnlinksAfter != nil:
		p.Fault(n, path, "a log is not unlinked while it is open; rotation takes care of it")
	case w.To == ToLog:
	case !isVolume:
		p.Fault(n, path, `to must be layer, log or "volume NAME"`)
	default:
		p.use(n, path, "volume", volume)
		p.uses[len(p.uses)-1].name = pod.Name + "/" + volume
	}
	return w
}

func (p *parser) host(s *Scenario) func(*yaml.Node, string) {
	return p.named(func(name, n *yaml.Node, path string) {
		h := HostProcess{Name: name.Value}
		if n.Kind != yaml.MappingNode {
			p.Fault(n, path, "must be keys with values below them (key: value), not %s", strict.KindOf(n))
			return
		}
		p.keys(n, path, keys{
			{"on", p.reference(&h.Filesystem, "filesystem")},
			{"writes", func(n *yaml.Node, path string) { h.Write = p.write(n, path, nil) }},
		})
		if h.Filesystem == "" {
			p.Fault(n, path, "is on no filesystem; give on")
		}
		s.Host = append(s.Host, h)
	})
}

func (p *parser) faults(s *Scenario) func(*yaml.Node, string) {
	return p.list(func(n *yaml.Node, path string) {
		var f Fault
		p.keys(n, path, keys{
			{"kind", p.oneOf(&f.Kind, faultKinds()...)},
			{"from", p.duration(&f.From)},
			{"until", p.duration(&f.Until)},
			{"pods", p.names(&f.Pods, "pod")},
			{"on", p.reference(&f.On, "filesystem")},
		})
		hasFilesystem := f.Kind == RootUnmounted || f.Kind == DiskFull
		ends := f.Kind == ContainerdKilled || f.Kind == SnapshotterKilled || f.Kind == RootUnmounted
		switch {
		case f.Kind == "":
			p.Fault(n, path, "has no kind")
		case f.Until > 0 && f.Until <= f.From:
			p.Fault(n, path, "until must be after from")
		case len(f.Pods) > 0 && f.Kind != MissingPodStats:
			p.Fault(n, path, "pods is for %s only", MissingPodStats)
		case hasFilesystem && f.On == "":
			p.Fault(n, path, "%s is on no filesystem; give on", f.Kind)
		case f.On != "" && !hasFilesystem:
			p.Fault(n, path, "on is for %s and %s only", RootUnmounted, DiskFull)
		case ends && f.Until == 0:
			p.Fault(n, path, "%s has no end; give until", f.Kind)
		case f.Kind == DiskFull && f.Until > 0:
			p.Fault(n, path, "%s stays; leave until out", f.Kind)
		}
		s.Faults = append(s.Faults, f)
	})
}

// signals reads a map of the kubelet's configuration, as engine reads it.
func (p *parser) signals(to *map[string]string) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		*to = map[string]string{}
		p.Keys(n, path, "this", func(key, value *yaml.Node, path string) {
			var text string
			if value.Kind == yaml.ScalarNode && p.Plain(value, path) {
				text = value.Value // 10Gi and 1000 both are what the kubelet reads
				if len(text) > maxThreshold || engine.Endless(text) {
					p.Fault(value, path, "%s is no amount; write it like 10Gi, 5%% or 1m", strict.Shown(text))
					return
				}
			} else {
				p.Fault(value, path, "must be one value, not %s", strict.KindOf(value))
				return
			}
			(*to)[key.Value] = text
			p.places[strings.TrimPrefix(path, "kubelet.")] = value
		})
	}
}

func (p *parser) kubelet(k *Kubelet) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		var set engine.Settings
		reads, maxGrace := "", 0
		p.keys(n, path, keys{
			{"evictionHard", p.signals(&set.Hard)},
			{"evictionSoft", p.signals(&set.Soft)},
			{"evictionSoftGracePeriod", p.signals(&set.SoftGrace)},
			{"evictionMinimumReclaim", p.signals(&set.MinReclaim)},
			{"evictionPressureTransitionPeriod", p.duration(&k.PressureTransitionPeriod)},
			{"evictionMaxPodGracePeriod", p.integer(&maxGrace)},
			{"imageGCHighThresholdPercent", p.integer(&k.ImageGCHighPercent)},
			{"imageGCLowThresholdPercent", p.integer(&k.ImageGCLowPercent)},
			{"imageMinimumGCAge", p.duration(&k.ImageMinimumAge)},
			{"imageMaximumGCAge", p.duration(&k.ImageMaximum)},
			{"containerLogMaxSize", p.bytes(&k.ContainerLogMaxSizeBytes)},
			{"containerLogMaxFiles", p.integer(&k.ContainerLogMaxFiles)},
			{"readsFrom", scalar(p, &reads, strict.Text, func(v string) error {
				if v != "runtime" && v != "cadvisor" {
					return fmt.Errorf("%s is none of runtime, cadvisor", strict.Shown(v))
				}
				return nil
			})},
		})
		k.MaxPodGraceSeconds, k.CRIO = int64(maxGrace), reads == "cadvisor"
		if set.Hard == nil && set.Soft == nil {
			return
		}
		if list, ok := p.thresholds(n, path, set); ok {
			k.Thresholds = list
		}
	}
}

func (p *parser) thresholds(n *yaml.Node, path string, set engine.Settings) ([]engine.Threshold, bool) {
	list, err := engine.Parse(set)
	if err == nil {
		return list, true
	}
	var faults interface{ Unwrap() []error }
	if !errors.As(err, &faults) {
		p.Fault(n, path, "%s", err)
		return nil, false
	}
	for _, one := range faults.Unwrap() {
		at := n
		var setting *engine.SettingError
		if errors.As(one, &setting) {
			for _, place := range []string{setting.Setting + "." + setting.Signal, strict.Join(setting.Setting, setting.Signal)} {
				if found := p.places[place]; found != nil {
					at = found
				}
			}
		}
		p.Fault(at, path, "%s", one)
	}
	return nil, false
}

func (p *parser) cleave(c *Cleave) func(*yaml.Node, string) {
	options := reflect.TypeFor[engine.Options]()
	return func(n *yaml.Node, path string) {
		var last map[string]string
		p.keys(n, path, keys{
			{"lastResort", p.signals(&last)},
			{"logBudget", p.bytes(&c.LogBudgetBytes)},
			{"ownerPerHour", p.integer(&c.OwnerPerHour)},
			{"perHour", p.integer(&c.PerHour)},
			{"options", p.named(func(name, n *yaml.Node, path string) {
				if _, ok := options.FieldByName(name.Value); !ok {
					p.Fault(name, path, "is no option; docs/engine.md lists them")
					return
				}
				var on bool
				p.boolean(&on)(n, path)
				if c.Options == nil {
					c.Options = map[string]bool{}
				}
				c.Options[name.Value] = on
			})},
		})
		if last == nil {
			return
		}
		if list, ok := p.thresholds(n, path, engine.Settings{Hard: last}); ok {
			if c.LastResort = list; list == nil {
				c.LastResort = []engine.Threshold{}
			}
		}
	}
}

func (p *parser) expect(s *Scenario) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		read := func(profile string) func(*yaml.Node, string) {
			return func(n *yaml.Node, path string) {
				var e Expect
				p.keys(n, path, keys{
					{"evicted", optional(&e.Evicted, func(to *[]string) func(*yaml.Node, string) { return p.names(to, "pod") })},
					{"notEvicted", p.names(&e.NotEvicted, "pod")},
					{"evictionsAtLeast", optional(&e.EvictionsAtLeast, p.integer)},
					{"evictionsAtMost", optional(&e.EvictionsAtMost, p.integer)},
					{"pressureAtLeast", optional(&e.PressureAtLeast, p.integer)},
					{"pressureAtMost", optional(&e.PressureAtMost, p.integer)},
					{"imagesRemoved", optional(&e.ImagesRemoved, func(to *[]string) func(*yaml.Node, string) { return p.names(to, "image") })},
					{"imagesKept", p.names(&e.ImagesKept, "image")},
					{"noSpaceAtLeast", p.times(&e.NoSpaceAtLeast)},
					{"noSpaceAtMost", p.times(&e.NoSpaceAtMost)},
					{"availableAtLeast", p.amounts(&e.AvailableAtLeast, "filesystem")},
					{"heldBackBy", p.names(&e.HeldBackBy, "")},
				})
				s.Expect[profile] = e
			}
		}
		p.keys(n, path, keys{{"kubelet", read("kubelet")}, {"cleave", read("cleave")}, {"lab", optional(&s.Lab, p.labExpect)}})
	}
}

func (p *parser) labExpect(e *LabExpect) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		p.keys(n, path, keys{
			{"layout", p.oneOf(&e.Layout, "single", "dedicated", "split", "separate")},
			{"deadRemovedAtLeast", optional(&e.DeadRemovedAtLeast, p.integer)},
			{"unattributedAtLeast", p.amounts(&e.UnattributedAtLeast, "filesystem")},
			{"openDeletedAtLeast", p.amounts(&e.OpenDeletedAtLeast, "pod")},
			{"logsAtMost", p.amounts(&e.LogsAtMost, "pod")},
			{"running", p.names(&e.Running, "pod")},
			{"says", p.names(&e.Says, "")},
		})
	}
}

// amounts reads bytes by name of things of a kind.
func (p *parser) amounts(to *map[string]int64, kind string) func(*yaml.Node, string) {
	return p.named(func(name, n *yaml.Node, path string) {
		p.use(name, path, kind, name.Value)
		var v int64
		p.bytes(&v)(n, path)
		if *to == nil {
			*to = map[string]int64{}
		}
		(*to)[name.Value] = v
	})
}

// times reads durations by name of a pod or process.
func (p *parser) times(to *map[string]time.Duration) func(*yaml.Node, string) {
	return p.named(func(name, n *yaml.Node, path string) {
		p.use(name, path, "pod or process", name.Value)
		var d time.Duration
		p.duration(&d)(n, path)
		if *to == nil {
			*to = map[string]time.Duration{}
		}
		(*to)[name.Value] = d
	})
}

// resolve checks that what is named is there.
func (p *parser) resolve(s *Scenario) {
	known := map[string]map[string]bool{"filesystem": {}, "image": {}, "pod": {}, "pod or process": {}, "volume": {}}
	add := func(kind, name string) {
		if known[kind][name] {
			p.Fault(&yaml.Node{Line: 1, Column: 1}, kind, "%s is there twice", strict.Shown(name))
		}
		known[kind][name] = true
	}
	for _, f := range s.Filesystems {
		add("filesystem", f.Name)
	}
	for _, i := range s.Images {
		add("image", i.Name)
	}
	for _, pod := range s.Pods {
		add("pod", pod.Name)
		add("pod or process", pod.Name)
		for _, v := range pod.Volumes {
			known["volume"][pod.Name+"/"+v.Name] = true
			if i := strings.LastIndexByte(pod.Name, '-'); i > 0 {
				known["volume"][pod.Name[:i]+"/"+v.Name] = true // of many: written under the name of all
			}
		}
	}
	for _, h := range s.Host {
		add("pod or process", h.Name)
	}
	for _, u := range p.uses {
		if names, ok := known[u.kind]; ok && !names[u.name] {
			some := slices.Sorted(maps.Keys(names))
			p.Fault(u.node, u.path, "there is no %s %s; there are %s", u.kind, strict.Shown(u.name), strings.Join(some[:min(10, len(some))], ", "))
		}
	}
}
