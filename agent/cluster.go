package agent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/kubeletapi"
	"github.com/cleave-cri/cleave/kube"
)

// cluster is what is known from Kubernetes and asked of it.
type cluster struct {
	client *kube.Client
	watch  *kube.Watch
	static *kube.Manifests
	page   *kube.KubeletPods
	teller *teller

	as identity
	// end lets all that runs end.
	end     context.CancelFunc
	running sync.WaitGroup
}

// identity is where a kubelet has its pods from, and as whom.
type identity struct {
	kubeconfig string
	// sum is of the file's content. Certificates and tokens in files of their own are renewed without it, and read anew by the client.
	sum                 [sha256.Size]byte
	node, staticPodPath string
}

func (c *cluster) view() kube.View {
	if c == nil {
		return kube.View{}
	}
	return viewOf(c.watch.Pods(), c.page.Pods(), c.static.Pods(), time.Now())
}

// viewOf is what is known of pods. As long as the API server is heard of, the kubelet's page says nothing better, and a pod that is gone
// may be on it still: whoever was evicted a moment ago would be told to go again. What the kubelet said long ago says nothing either.
func viewOf(api, page, static kube.Snapshot, now time.Time) kube.View {
	heard := !api.AsOf.IsZero() && now.Sub(api.AsOf) < apiSilent
	if heard || now.Sub(page.AsOf) > podsMaxAge {
		page.Pods = nil
	}
	return kube.Merge(api, page, static)
}

// connect begins to watch this node's pods, and again when the kubelet belongs to another cluster or is another node there, as after
// it was reset and joined anew. While the kubelet's files can't be read, what was known goes on.
func (d *decisions) connect(ctx context.Context, parts *sync.WaitGroup) error {
	s := d.kubelet.Load()
	if s == nil {
		return nil
	}
	kubeconfig := cmp.Or(d.cfg.Reclaim.Kubeconfig, s.Kubeconfig.Value)
	old := d.cluster.Load()
	if kubeconfig == "" {
		// A kubelet of its own: pods' needs are not known, and none is evicted.
		if old != nil {
			d.log.Info("the kubelet has no API server any more")
			d.cluster.Store(nil)
			old.end()
		}
		return nil
	}
	content, err := os.ReadFile(kubeconfig)
	if err != nil {
		return fmt.Errorf("read who the kubelet is at its API server: %w", err)
	}
	node, err := nodeName(*s)
	if err != nil {
		return err
	}
	as := identity{kubeconfig: kubeconfig, sum: sha256.Sum256(content), node: node, staticPodPath: s.StaticPodPath.Value}
	if old != nil && old.as == as {
		return nil
	}
	client, err := nodeClient(kubeconfig, *s)
	if err != nil {
		return err
	}
	within, end := context.WithCancel(ctx)
	c := &cluster{client: client, watch: kube.NewWatch(client), static: kube.NewManifests(as.staticPodPath, as.node, kubeletEvery), as: as, end: end}
	if c.page, err = kube.NewKubeletPods(kube.KubeletPodsOptions{Ask: d.askPods, Every: pagePeriod}); err != nil {
		end()
		return err
	}
	c.teller = newTeller(client, d.cfg, d.log.Named("kube"))
	d.cluster.Store(c)
	if old != nil {
		d.log.Info("the kubelet has other pods than before; they are asked for anew", zap.String("kubeconfig", kubeconfig), zap.String("node", as.node))
		old.end()
		old.running.Wait() // what it takes back, the new one may set
	}
	c.running.Go(func() { c.teller.run(within) })
	for _, run := range []func(context.Context) error{c.watch.Run, c.page.Run, c.static.Run} {
		c.running.Go(func() {
			if err := run(within); err != nil && within.Err() == nil {
				d.log.Warn("pods are not known any more", zap.Error(err))
			}
		})
	}
	parts.Go(c.running.Wait)
	return nil
}

// askPods asks the kubelet that runs for its pods.
func (d *decisions) askPods(ctx context.Context) ([]byte, error) {
	s := d.kubelet.Load()
	if s == nil || !runs(s) {
		return nil, errors.New("it does not run")
	}
	return kubeletapi.Client{TokenFile: d.cfg.CRIO.KubeletTokenFile}.Pods(ctx, *s)
}
