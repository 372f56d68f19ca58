package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/config/kubelet"
	"github.com/cleave-cri/cleave/kube/report"
)

// eventsEvery is how often the API server is looked for while there is something to tell it and it is not known.
const eventsEvery = 10 * time.Second

// nodeEvents tells the cluster, in events on this node, what keeps the kubelet from seeing its disks. It speaks as the kubelet does.
type nodeEvents struct {
	// kubelet finds the kubelet's settings, connect the API server for them.
	kubelet func(context.Context) (kubelet.Settings, error)
	connect func(kubelet.Settings) (events, error)
	log     *zap.Logger
	woken   chan struct{}

	mu      sync.Mutex
	waiting []string // guarded by mu; not told yet
}

// events is a teller of events; report.Events is one.
type events interface {
	Tell(report.Event)
	Run(ctx context.Context) error
}

func newNodeEvents(listen string, log *zap.Logger) *nodeEvents {
	return &nodeEvents{
		kubelet: func(ctx context.Context) (kubelet.Settings, error) {
			return kubelet.Reader{}.Find(ctx, kubelet.Choice{Endpoints: []string{listen, crioEndpoint}})
		},
		connect: func(s kubelet.Settings) (events, error) {
			if s.Kubeconfig.Value == "" {
				return nil, fmt.Errorf("the kubelet (pid %d) has no --kubeconfig", s.PID)
			}
			client, err := nodeClient(s.Kubeconfig.Value, s)
			if err != nil {
				return nil, err
			}
			return report.NewEvents(client, client.Node()), nil
		},
		log: log, woken: make(chan struct{}, 1),
	}
}

// tell takes what keeps the kubelet from seeing its disks now. It does not wait.
func (n *nodeEvents) tell(problems []string) {
	n.mu.Lock()
	n.waiting = problems // what no longer is so is not told late
	n.mu.Unlock()
	select {
	case n.woken <- struct{}{}:
	default:
	}
}

func (n *nodeEvents) take() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	list := n.waiting
	n.waiting = nil
	return list
}

func (n *nodeEvents) empty() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.waiting) == 0
}

// run tells until ctx ends. The API server is looked for only when there is something to tell.
func (n *nodeEvents) run(ctx context.Context) {
	tick := time.NewTicker(eventsEvery)
	defer tick.Stop()
	var running sync.WaitGroup
	defer running.Wait()
	var teller events
	said := ""
	for {
		if !n.empty() && teller == nil {
			var err error
			if teller, err = n.find(ctx); err != nil && err.Error() != said && ctx.Err() == nil {
				said = err.Error()
				n.log.Info("what keeps the kubelet from seeing its disks is told in status and metrics, but in no event", zap.Error(err))
			}
			if teller != nil {
				running.Go(func() { _ = teller.Run(ctx) }) //nolint:errcheck // it ends with ctx, and counts its own failures
			}
		}
		if teller != nil {
			for _, problem := range n.take() {
				teller.Tell(report.Event{Reason: report.DisksUnseen, Warning: true, Note: problem})
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-n.woken:
		case <-tick.C:
		}
	}
}

func (n *nodeEvents) find(ctx context.Context) (events, error) {
	s, err := n.kubelet(ctx)
	if err != nil {
		return nil, err
	}
	return n.connect(s)
}
