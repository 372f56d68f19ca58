package reclaim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/cleave-cri/cleave/engine/garbage"
	"github.com/cleave-cri/cleave/engine/record"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

// What the kubelet makes in the pods' log directory (kubelet,
// pkg/kubelet/kuberuntime: BuildPodLogsDirectory, buildContainerLogsPath;
// pkg/kubelet/logs). Whatever is called otherwise is somebody else's and stays
// (GAP-37).
var (
	// podDir is NAMESPACE_NAME_UID; a static pod's UID is a hash.
	podDir = regexp.MustCompile(`^[a-z0-9][-a-z0-9]*_[a-z0-9][-.a-z0-9]*_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})$`)
	// containerDir is a container's name.
	containerDir = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	// currentLog is the file that is written to, named by the number of restarts.
	currentLog = regexp.MustCompile(`^[0-9]+\.log$`)
	// rotatedLog is one that was renamed, and maybe compressed.
	rotatedLog = regexp.MustCompile(`^([0-9]+\.log)\.[0-9]{8}-[0-9]{6}(\.gz)?$`)
	// anyLog is any of them, and one that is being compressed.
	anyLog = regexp.MustCompile(`^[0-9]+\.log(\.[0-9]{8}-[0-9]{6}(\.gz)?(\.tmp)?)?$`)
)

const (
	temporary  = ".tmp"
	compressed = ".gz"
	// maxEntries bounds the names that are read in the pods' log directory.
	maxEntries = 200_000
)

// Logs deletes the logs of pods that are gone, and rotated logs.
type Logs struct {
	Site
	Runtime runtimeapi.RuntimeServiceClient
	Pods    PodFates
	// Dir is the pods' log directory, the kubelet's podLogsDir.
	Dir string
}

// Left is something in the pods' log directory that stays, and why.
type Left struct {
	Path, Why string
}

// Choice reads what there is to pick from. Paths are relative to the pods' log
// directory; a pod that is gone is one item, its folder. Of rotated logs the
// newest of each container stays, and one that is being compressed. left is what
// is not understood.
func (x *Logs) Choice(ctx context.Context, needBytes int64) (c record.LogChoice, left []Left, err error) {
	c.NeedBytes = needBytes
	gone, err := x.gone(ctx)
	if err != nil {
		return c, nil, err
	}
	root, err := openLogs(x.Dir)
	if err != nil {
		return c, nil, err
	}
	defer root.close()
	names, err := root.names(".")
	if err != nil {
		return c, nil, err
	}
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return c, nil, err
		}
		if !podDir.MatchString(name) {
			left = append(left, Left{name, "it is not named as the kubelet names a pod's logs"})
			continue
		}
		if gone(name) {
			file, err := root.whole(name)
			if err != nil {
				left = append(left, Left{name, err.Error()})
				continue
			}
			c.Gone = append(c.Gone, file)
			continue
		}
		rotated, odd := root.rotated(name)
		c.Rotated = append(c.Rotated, rotated...)
		left = append(left, odd...)
	}
	return c, left, nil
}

// gone returns a function that tells folders of pods that are gone: the kubelet's
// rule says so, and the runtime has nothing of them.
func (x *Logs) gone(ctx context.Context) (func(name string) bool, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	pods, err := x.Pods.Pods(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask for the fate of pods: %w", err)
	}
	sandboxes, err := x.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	containers, err := x.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	there := map[string]bool{}
	for _, s := range sandboxes.GetItems() {
		there[s.GetMetadata().GetUid()], there[s.GetLabels()[uidLabel]] = true, true
	}
	for _, c := range containers.GetContainers() {
		there[c.GetLabels()[uidLabel]] = true
	}
	return func(name string) bool {
		m := podDir.FindStringSubmatch(name)
		return m != nil && !there[m[1]] && len(garbage.LogDirsOfPods([]string{name}, pods)) == 1
	}, nil
}

// Check looks whether a step could be carried out now, and deletes nothing.
func (x *Logs) Check(ctx context.Context, step record.Step) (record.Step, error) {
	return x.with(step, func(look examine) (record.Step, error) { return check(ctx, step, look) })
}

// Run deletes the logs of a step. The returned step says what came of each; it is
// good also beside an error.
func (x *Logs) Run(ctx context.Context, step record.Step) (record.Step, error) {
	return x.with(step, func(look examine) (record.Step, error) { return x.run(ctx, step, look) })
}

func (x *Logs) with(step record.Step, do func(examine) (record.Step, error)) (record.Step, error) {
	root, err := openLogs(x.Dir)
	if err != nil {
		return step, fmt.Errorf("reclaim %s: %w: %w", step.Kind, ErrSurprise, err)
	}
	defer root.close()
	return do(func(ctx context.Context, item record.Item) (removal, error) { return x.examine(ctx, root, step, item) })
}

func (x *Logs) examine(ctx context.Context, root *logRoot, step record.Step, item record.Item) (removal, error) {
	if step.Logs == nil {
		return removal{}, errors.New("the step has no choice of logs")
	}
	planned := func(list []garbage.LogFile) (garbage.LogFile, bool) {
		i := slices.IndexFunc(list, func(f garbage.LogFile) bool { return f.Path == item.ID })
		if i < 0 {
			return garbage.LogFile{}, false
		}
		return list[i], true
	}
	same := func(then, now garbage.LogFile) error {
		if then.Bytes != now.Bytes || !then.WrittenAt.Equal(now.WrittenAt) {
			return fmt.Errorf("%w: it was written to", errChanged)
		}
		return nil
	}
	if then, ok := planned(step.Logs.Gone); ok {
		gone, err := x.gone(ctx)
		if err != nil {
			return removal{}, err
		}
		if !gone(then.Path) {
			return removal{}, errors.New("its pod is not gone")
		}
		now, err := root.whole(then.Path)
		if err == nil {
			err = same(then, now)
		}
		if err != nil {
			return removal{}, err
		}
		return removal{what: "logs of a pod", delete: func(context.Context) error { return root.removeWhole(then.Path) }}, nil
	}
	then, ok := planned(step.Logs.Rotated)
	if !ok {
		return removal{}, errors.New("it is not among what was picked from")
	}
	parts := strings.Split(then.Path, "/")
	if len(parts) != 3 {
		return removal{}, errors.New("it is no path of a rotated log")
	}
	rotated, _ := root.rotated(parts[0])
	i := slices.IndexFunc(rotated, func(f garbage.LogFile) bool { return f.Path == then.Path })
	if i < 0 {
		return removal{}, fmt.Errorf("%w, or it is not a rotated log that can go", errGone)
	}
	if err := same(then, rotated[i]); err != nil {
		return removal{}, err
	}
	return removal{what: "log", delete: func(context.Context) error { return root.remove(then.Path) }}, nil
}

// logRoot is the pods' log directory, open: all below it is looked at and deleted
// relative to it, follows no symlink and leaves the filesystem nowhere.
type logRoot struct{ root *rootdir.Root }

func openLogs(dir string) (*logRoot, error) {
	root, err := rootdir.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open the pods' log directory: %w", err)
	}
	return &logRoot{root}, nil
}

func (l *logRoot) close() { _ = l.root.Close() } //nolint:errcheck // a folder that was only read

func (l *logRoot) names(dir string) ([]string, error) {
	names, err := l.root.Names(dir)
	if err != nil {
		return nil, err
	}
	if len(names) > maxEntries {
		return nil, fmt.Errorf("%s has %d entries, too many to look at", dir, len(names))
	}
	slices.Sort(names)
	return names, nil
}

// file looks at a regular file.
func (l *logRoot) file(name string) (garbage.LogFile, error) {
	p, err := l.root.Stat(name)
	if err != nil {
		return garbage.LogFile{}, err
	}
	if !p.IsFile() {
		return garbage.LogFile{}, fmt.Errorf("%s is no regular file", name)
	}
	f := garbage.LogFile{Path: name, WrittenAt: time.Unix(0, p.Modified)}
	if p.Links <= 1 { // else it has another name, and nothing comes free
		f.Bytes = int64(p.Blocks) * 512
	}
	return f, nil
}

// visit calls f with each of a pod's logs. It is an error if there is anything
// that the kubelet does not make.
func (l *logRoot) visit(pod string, f func(container, name string) error) error {
	containers, err := l.names(pod)
	if err != nil {
		return err
	}
	for _, c := range containers {
		dir := path.Join(pod, c)
		if p, err := l.root.Stat(dir); err != nil {
			return err
		} else if !p.IsDir() || !containerDir.MatchString(c) {
			return fmt.Errorf("%s is not what the kubelet makes there", dir)
		}
		names, err := l.names(dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			if !anyLog.MatchString(name) {
				return fmt.Errorf("%s is not what the kubelet makes there", path.Join(dir, name))
			}
			if err := f(dir, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// whole looks at all logs of a pod.
func (l *logRoot) whole(pod string) (garbage.LogFile, error) {
	sum := garbage.LogFile{Path: pod}
	err := l.visit(pod, func(dir, name string) error {
		f, err := l.file(path.Join(dir, name))
		sum.Bytes += f.Bytes
		if f.WrittenAt.After(sum.WrittenAt) {
			sum.WrittenAt = f.WrittenAt
		}
		return err
	})
	return sum, err
}

// removeWhole removes all logs of a pod and its folders. Something unknown that
// has come meanwhile stays, with the folders that it is in.
func (l *logRoot) removeWhole(pod string) error {
	var dirs []string
	err := l.visit(pod, func(dir, name string) error {
		if !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
		return l.remove(path.Join(dir, name))
	})
	if err != nil {
		return err
	}
	empty, err := l.names(pod)
	if err != nil {
		return err
	}
	for _, name := range empty {
		if err := l.root.RemoveDir(path.Join(pod, name)); err != nil {
			return err
		}
	}
	return l.root.RemoveDir(pod)
}

// rotated lists the rotated logs of a pod that can go, and what is not
// understood.
func (l *logRoot) rotated(pod string) (out []garbage.LogFile, odd []Left) {
	leave := func(name string, err error) {
		if !errors.Is(err, fs.ErrNotExist) {
			odd = append(odd, Left{name, err.Error()})
		}
	}
	containers, err := l.names(pod)
	if err != nil {
		leave(pod, err)
		return nil, odd
	}
	for _, c := range containers {
		dir := path.Join(pod, c)
		if !containerDir.MatchString(c) {
			leave(dir, errors.New("it is not named as the kubelet names a container's logs"))
			continue
		}
		names, err := l.names(dir) // of a folder that is no symlink
		if err != nil {
			leave(dir, err)
			continue
		}
		byLog := map[string][]garbage.LogFile{}
		for _, name := range names {
			m := rotatedLog.FindStringSubmatch(name)
			if m == nil {
				if !anyLog.MatchString(name) {
					leave(path.Join(dir, name), errors.New("it is not named as the kubelet names a log"))
				}
				continue
			}
			f, err := l.file(path.Join(dir, name))
			if err != nil {
				leave(path.Join(dir, name), err)
				continue
			}
			byLog[m[1]] = append(byLog[m[1]], f)
		}
		for _, files := range byLog {
			out = append(out, spare(files, names)...)
		}
	}
	slices.SortFunc(out, func(a, b garbage.LogFile) int { return strings.Compare(a.Path, b.Path) })
	return out, odd
}

// spare are those of one log's rotated files that can go. names are all in the
// folder. The newest stays: readers may still be on it (LOG-10). Names are in
// local time, which can go back (LOG-14), so the newest by name and the one
// written to last both stay. So does one that is being compressed.
func spare(files []garbage.LogFile, names []string) []garbage.LogFile {
	var byName, byTime garbage.LogFile
	for _, f := range files {
		if f.Path > byName.Path {
			byName = f
		}
		if byTime.Path == "" || f.WrittenAt.After(byTime.WrittenAt) {
			byTime = f
		}
	}
	return slices.DeleteFunc(files, func(f garbage.LogFile) bool {
		name := path.Base(f.Path)
		busy := slices.Contains(names, name+temporary) || slices.Contains(names, name+compressed+temporary)
		return f.Path == byName.Path || f.Path == byTime.Path || busy
	})
}

// remove removes one file.
func (l *logRoot) remove(name string) error {
	p, err := l.root.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !p.IsFile() {
		return fmt.Errorf("%w: %s is no regular file", ErrSurprise, name)
	}
	return l.root.RemoveFile(name)
}

// removeLog removes what is named as a log or begins with its name and a dot, as
// far as these are regular files of the kubelet's.
func (l *logRoot) removeLog(pod, container, log string) error {
	if !containerDir.MatchString(container) {
		return nil
	}
	dir := path.Join(pod, container)
	names, err := l.names(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, name := range names {
		if name != log && !(strings.HasPrefix(name, log+".") && anyLog.MatchString(name)) {
			continue
		}
		if p, err := l.root.Stat(path.Join(dir, name)); err != nil || !p.IsFile() {
			continue
		}
		if err := l.root.RemoveFile(path.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}
