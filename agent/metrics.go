package agent

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/ephemeral"
	imagestore "github.com/cleave-cri/cleave/agent/store"
	"github.com/cleave-cri/cleave/fsstats"
	"github.com/cleave-cri/cleave/fsstats/index"
	"github.com/cleave-cri/cleave/proxy"
	"github.com/cleave-cri/cleave/web"
)

// values are what the metrics show now. It does not block.
func (a *agent) values() web.Values {
	now, p := time.Now(), a.observer.newest.Load()
	v := web.Values{Version: a.opt.Version, Filesystems: filesystemValues(p, now), Survey: surveyValues(p, a.observer.index.View().Entries, now)}
	v.Containers, v.Pods = ownerValues(p)
	v.Images = imageValues(a.images.images())
	v.Proxy = proxyValues(a.proxy.Counters())
	if a.decisions != nil {
		v.Reclaim = reclaimValues(a.decisions.status(), now)
	}
	heap := memoryStatus().HeapBytes
	v.HeapBytes = &heap
	if a.crio != nil {
		v.Kubelet = a.crio.status(a.observer.disks(), p).values()
	}
	return v
}

// filesystemValues are the filesystems of a picture, each once for each of its roles.
func filesystemValues(p *picture, now time.Time) (out []web.Filesystem) {
	for _, place := range p.layout.Places {
		f, account := place.Filesystem, p.accounts[place.Filesystem.Device]
		x := web.Filesystem{
			Role: string(place.Role), Device: f.Device.String(), Mountpoint: f.Mountpoint,
			CapacityBytes: f.CapacityBytes, AvailableBytes: f.AvailableBytes, UsedBytes: f.UsedBytes, Inodes: f.InodesTotal, InodesFree: f.InodesFree,
			ReservedBytes: account.ReservedBytes, Unmeasured: account.Unmeasured,
			Stuck: place.Missing || slices.ContainsFunc(p.stuck, func(s fsstats.Standing) bool { return s.Role == place.Role }),
		}
		if !p.readAt.IsZero() && account.Unmeasured == 0 {
			x.UnattributedBytes = &account.UnattributedBytes
		}
		if account.Oldest != nil {
			age := max(0, now.Sub(*account.Oldest).Seconds())
			x.OldestSeconds = &age
		}
		if !p.readAt.IsZero() {
			open := uint64(0)
			for _, c := range account.Classes {
				x.Classes = append(x.Classes, web.Class{Class: c.Class, Bytes: c.Bytes, Inodes: c.Inodes})
				if c.Class == classOpen {
					open = c.Bytes
				}
			}
			x.OpenDeletedBytes = &open
		}
		out = append(out, x)
	}
	return out
}

// plusUse adds to a figure that may not be known.
func plusUse(sum *uint64, u *ephemeral.Use) *uint64 {
	if u == nil {
		return sum
	}
	total := u.Bytes
	if sum != nil {
		total = saturatingAdd(total, *sum)
	}
	return &total
}

func orZero(n *uint64) uint64 {
	if n == nil {
		return 0
	}
	return *n
}

// ownerValues are the running containers and the pods, those that hold most first.
func ownerValues(p *picture) (containers []web.Container, pods []web.Pod) {
	used := map[string]ephemeral.Usage{}
	for _, u := range p.pods {
		used[u.UID] = u
	}
	for _, pod := range p.held {
		x := web.Pod{Namespace: pod.Namespace, Pod: pod.Name, UID: pod.UID}
		for _, on := range used[pod.UID].HeldOn {
			x.HeldBytes = saturatingAdd(x.HeldBytes, on.Bytes)
		}
		if k := used[pod.UID].Kubelet; k != nil {
			x.KubeletBytes = &k.Bytes
		}
		for _, v := range pod.Volumes {
			if v.EmptyDir {
				x.EmptyDirBytes = plusUse(x.EmptyDirBytes, v.Use)
			}
		}
		x.LogsBytes = plusUse(x.LogsBytes, pod.LogFiles)
		list := containerValues(pod)
		for _, c := range list {
			if c.LogsBytes != nil {
				x.LogsBytes = plusUse(x.LogsBytes, &ephemeral.Use{Bytes: *c.LogsBytes})
			}
		}
		containers = append(containers, list...)
		pods = append(pods, x)
	}
	total := func(c web.Container) uint64 {
		return saturatingAdd(saturatingAdd(orZero(c.RootFSBytes), orZero(c.LogsBytes)), orZero(c.OpenDeletedBytes))
	}
	slices.SortStableFunc(containers, func(a, b web.Container) int { return cmp.Compare(total(b), total(a)) })
	slices.SortStableFunc(pods, func(a, b web.Pod) int { return cmp.Compare(b.HeldBytes, a.HeldBytes) })
	return containers, pods
}

// containerValues are the containers of a pod that run; their earlier instances count for them.
func containerValues(pod ephemeral.Pod) (out []web.Container) {
	running := map[string]bool{}
	for _, c := range pod.Containers {
		running[c.Name] = running[c.Name] || c.Running
	}
	for _, c := range pod.Containers {
		if !running[c.Name] {
			continue
		}
		i := slices.IndexFunc(out, func(x web.Container) bool { return x.Container == c.Name })
		if i < 0 {
			i = len(out)
			out = append(out, web.Container{Namespace: pod.Namespace, Pod: pod.Name, UID: pod.UID, Container: c.Name})
		}
		x := &out[i]
		x.RootFSBytes = plusUse(x.RootFSBytes, c.Layer)
		if c.LogFiles != nil { // all of one name have one folder
			x.LogsBytes = &c.LogFiles.Bytes
		}
		for _, open := range c.OpenDeleted {
			x.OpenDeletedBytes = plusUse(x.OpenDeletedBytes, &open)
		}
	}
	return out
}

// imageValues name images as people do; of two that are called the same, in two namespaces, the larger one is shown.
func imageValues(images []imagestore.Image) (out []web.Image) {
	seen := map[string]bool{}
	for _, i := range images {
		name := i.ID
		if len(i.Names) > 0 {
			name = i.Names[0]
		}
		if !seen[name] {
			seen[name] = true
			out = append(out, web.Image{Image: name, ExclusiveBytes: unsigned(i.Exclusive.TotalBytes())})
		}
	}
	return out
}

func proxyValues(c proxy.Counters) *web.Proxy {
	v := &web.Proxy{InFlight: c.CallsInFlight, Connections: c.Connections, Bounds: proxy.LatencyBounds()}
	for _, m := range c.Methods {
		v.Methods = append(v.Methods, web.Method{Method: m.Method, Codes: m.ByCode, Seconds: m.Seconds, Within: m.Within})
	}
	for _, f := range c.Fallbacks {
		v.Fallbacks = append(v.Fallbacks, web.Fallback(f))
	}
	return v
}

func reclaimValues(s *ReclaimStatus, now time.Time) *web.Reclaim {
	v := &web.Reclaim{
		Decisions: map[string]int64{}, Evictions: map[string]int64{}, EvictionsFailed: s.Counts.EvictionsFailed, Forecast: map[string]float64{}, Blind: s.Problem != "",
	}
	for outcome, n := range s.Counts.Outcomes {
		v.Decisions[string(outcome)] = n
	}
	for cause, n := range s.Counts.Causes {
		v.Evictions[string(cause)] = n
	}
	for _, r := range s.Counts.Rules {
		v.Deletions = append(v.Deletions, web.Deletion{
			Kind: string(r.Kind), Rule: r.Rule, Count: r.Deleted, Failed: r.Failed, ExpectedBytes: r.ExpectedBytes, GainedBytes: r.GainedBytes,
		})
	}
	if s.LookedAt != nil && s.Problem == "" {
		for _, c := range s.Coming {
			signal, seconds := string(c.Threshold.Signal), max(0, (c.In-now.Sub(*s.LookedAt)).Seconds())
			if soonest, ok := v.Forecast[signal]; !ok || seconds < soonest {
				v.Forecast[signal] = seconds
			}
		}
	}
	if r := s.Records; r != nil {
		v.Records = map[string]uint64{"written": r.Written, "dropped": r.Dropped, "failed": r.Failed}
	}
	return v
}

func surveyValues(p *picture, e index.Entries, now time.Time) *web.Survey {
	v := &web.Survey{Entries: map[string]int64{"first": e.First, "update": e.Update, "hot": e.Hot, "suspect": e.Suspect, "refresh": e.Refresh}}
	if !p.measuredAt.IsZero() {
		cost, age := p.cost.Seconds(), max(0, now.Sub(p.measuredAt).Seconds())
		v.Seconds, v.AgeSeconds = &cost, &age
	}
	return v
}

// metricsRetry is how often it is tried to get the address for metrics while another process has it.
const metricsRetry = time.Second

// serveMetrics serves metrics on the network until ctx ends. That it can't is told and no reason for anything else to end; as long as
// another process has the address, such as the one before this one, it is tried again. It has a handler of its own: whoever connects
// there and does not read takes no turn from the control socket, which is root's.
func serveMetrics(ctx context.Context, address string, values func() web.Values, log *zap.Logger) error {
	handler, err := web.Metrics(values)
	if err != nil {
		return err
	}
	said := ""
	for ctx.Err() == nil {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
		if err == nil {
			if said != "" {
				log.Info("metrics are served on the network now", zap.String("address", address))
			}
			err, said = serveMetricsOn(ctx, l, handler), ""
		}
		if err != nil && ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			log.Warn("metrics are not served on the network; it is tried again", zap.String("address", address), zap.Error(err))
		}
		if !sleep(ctx, metricsRetry, nil) {
			return nil
		}
	}
	return nil
}

func serveMetricsOn(ctx context.Context, l net.Listener, handler http.Handler) error {
	server := web.Server(handler)
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) //nolint:errcheck // it is over
	defer stop()
	err := server.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
