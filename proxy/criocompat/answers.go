package criocompat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
)

// Info is the answer to /info, in CRI-O's words.
type Info struct {
	// StorageDriver has to be "overlay": with any other cAdvisor measures no
	// container's root (KSS-10).
	StorageDriver string `json:"storage_driver"`
	// StorageRoot is a path on the filesystem of containers.
	StorageRoot string `json:"storage_root"`
	// StorageImage is a path on the filesystem of images if that is another one,
	// otherwise empty: then there is no split (KSS-4).
	StorageImage string `json:"storage_image"`
	// CgroupDriver is how the runtime makes cgroups. With systemd cAdvisor takes
	// only names that end in .scope (KSS-6).
	CgroupDriver Driver `json:"cgroup_driver"`
}

// Split reports whether the answer names two filesystems.
func (i Info) Split() bool { return i.StorageImage != "" }

// Container is the answer to /containers/ALIAS, in CRI-O's words.
type Container struct {
	// Name is the container's ID; cAdvisor takes it for a further name.
	Name string `json:"name"`
	// PID is the container's first process, 0 while there is none; cAdvisor asks
	// again for it. Network figures come from it.
	PID int `json:"pid"`
	// Image is the image's name.
	Image string `json:"image"`
	// CreatedTime is nanoseconds since 1970.
	CreatedTime int64 `json:"created_time"`
	// Labels and Annotations are those of the CRI: the kubelet knows by the labels
	// whose container it is.
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	// LogPath is the container's log file.
	LogPath string `json:"log_path"`
	// Root is the folder in which "diff", a real folder and not a link to one, is
	// the container's writable layer (KSS-10).
	Root string `json:"root"`
	// IP and IPs are the pod's addresses, empty in the host's network.
	IP  string   `json:"ip_address"`
	IPs []string `json:"ip_addresses"`
}

// InfoCall is one question for /info and its answer.
type InfoCall struct {
	At time.Time `json:"at"`
	// PID is the process that asked.
	PID int32 `json:"pid"`
	// Answer is nil where Error says why there was none.
	Answer *Info  `json:"answer,omitempty"`
	Error  string `json:"error,omitempty"`
}

// Status is what a server knows of itself.
type Status struct {
	// Infos are the last questions for /info, newest last.
	Infos []InfoCall `json:"infos,omitempty"`
	// Requests counts questions, Unknown those for containers that did not turn up.
	Requests int64 `json:"requests"`
	Unknown  int64 `json:"unknown"`
	// Waiting are connections that have said nothing yet, Dropped counts those
	// that were closed because of that.
	Waiting int   `json:"waiting"`
	Dropped int64 `json:"dropped"`
}

// Status returns what happened so far. It does not block.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Status{
		Infos:    slices.Clone(s.calls),
		Requests: s.asked.Load(),
		Unknown:  s.unknown.Load(),
		Waiting:  len(s.waiting),
		Dropped:  s.dropped.Load(),
	}
}

// pathOfContainer is where containers are asked for.
const pathOfContainer = "/containers/"

// ServeHTTP implements [http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var pid int32
	if g, ok := r.Context().Value(guestKey{}).(*guest); ok {
		pid = g.peer.PID
		s.heard(g)
	}
	s.asked.Add(1)
	select {
	case s.requests <- struct{}{}:
		defer func() { <-s.requests }()
	default:
		refuse(w, http.StatusServiceUnavailable, fmt.Sprintf("%d questions are being answered already", s.limits.requests))
		return
	}
	alias, ofContainer := strings.CutPrefix(r.URL.Path, pathOfContainer)
	switch {
	case r.Method != http.MethodGet:
		refuse(w, http.StatusNotFound, "nothing is here but GET /info and GET /containers/ALIAS")
	case r.URL.Path == "/info":
		s.info(r.Context(), w, pid)
	case ofContainer && IsAlias(alias):
		s.container(r.Context(), w, alias)
	case ofContainer:
		s.unknown.Add(1)
		refuse(w, http.StatusNotFound, fmt.Sprintf("%.100q is no alias of a container; cleave's have %d letters from g to v", alias, aliasLength))
	default:
		refuse(w, http.StatusNotFound, "nothing is here but GET /info and GET /containers/ALIAS")
	}
}

func (s *Server) info(ctx context.Context, w http.ResponseWriter, pid int32) {
	ctx, cancel := context.WithTimeout(ctx, s.limits.info)
	defer cancel()
	info, err := s.cfg.Informer.Info(ctx, pid)
	call := InfoCall{At: time.Now(), PID: pid}
	if err != nil {
		call.Error = err.Error()
		s.log.Error("a kubelet asked where its disks are and got no answer; restart the kubelet when this is mended",
			zap.Int32("pid", pid), zap.Error(err))
	} else {
		call.Answer = &info
		s.log.Info("a kubelet asked where its disks are", zap.Int32("pid", pid), zap.Bool("split", info.Split()),
			zap.String("storage_root", info.StorageRoot), zap.String("storage_image", info.StorageImage))
	}
	s.mu.Lock()
	s.calls = append(s.calls, call)
	s.calls = slices.Delete(s.calls, 0, max(0, len(s.calls)-callsKept))
	s.mu.Unlock()
	if err != nil {
		refuse(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	answer(w, info)
}

func (s *Server) container(ctx context.Context, w http.ResponseWriter, alias string) {
	c, err := s.find(ctx, alias)
	if err != nil {
		// Not found whatever the error: any other answer makes cAdvisor give up
		// for the container's whole life, while after this one it asks again (KSS-9).
		s.unknown.Add(1)
		refuse(w, http.StatusNotFound, fmt.Sprintf("container %s: %v", alias, err))
		if !errors.Is(err, ErrUnknown) {
			s.log.Warn("cAdvisor asked for a container that could not be looked up", zap.String("alias", alias), zap.Error(err))
		}
		return
	}
	if c.Labels == nil {
		c.Labels = map[string]string{} // cAdvisor writes into it (container/crio/handler.go: restartcount)
	}
	if c.Annotations == nil {
		c.Annotations = map[string]string{}
	}
	answer(w, c)
}

// find looks for a container, and again for a while if it is not there: cAdvisor
// asks as soon as the cgroup is made, when the container may still be on its way
// into the registry.
func (s *Server) find(ctx context.Context, alias string) (Container, error) {
	ctx, cancel := context.WithTimeout(ctx, s.limits.hold)
	defer cancel()
	c, err := s.cfg.Registry.Container(ctx, alias)
	if err == nil {
		return c, nil
	}
	select {
	case s.holds <- struct{}{}:
		defer func() { <-s.holds }()
	default:
		return Container{}, fmt.Errorf("%w (%d questions for such are being held already)", err, s.limits.holds)
	}
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return Container{}, err
		}
		c, next := s.cfg.Registry.Container(ctx, alias)
		if next == nil {
			return c, nil
		}
		if ctx.Err() == nil || !errors.Is(next, ctx.Err()) {
			err = next
		}
	}
}

// answer writes a value as JSON.
func answer(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		refuse(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) //nolint:errcheck // the caller is gone
}

// refuse writes why there is no answer, as text that is no JSON: cAdvisor does not
// look at the status of /info (container/crio/client.go: Info).
func refuse(w http.ResponseWriter, status int, why string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write([]byte("cleave: " + why + "\n")) //nolint:errcheck // the caller is gone
}
