package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/config"
	"github.com/cleave-cri/cleave/config/kubelet"
)

// A kubelet that was reset and joined to another cluster has other pods: those of the first must not stay the measure of who is gone.
func TestTheClusterFollowsTheKubelet(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	write := func(port int) {
		t.Helper()
		text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: c, cluster: {server: \"https://127.0.0.1:%d\"}}]\n"+
			"contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {token: x}}]\n", port)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d := &decisions{cfg: config.Default(), log: zap.NewNop()}
	ctx, cancel := context.WithCancel(t.Context())
	var parts sync.WaitGroup
	defer parts.Wait()
	defer cancel()
	var s kubelet.Settings
	s.NodeName.Value = "One"
	d.kubelet.Store(&s)
	connect := func(want error) *cluster {
		t.Helper()
		if err := d.connect(ctx, &parts); (err == nil) != (want == nil) {
			t.Fatalf("%v, want %v", err, want)
		}
		return d.cluster.Load()
	}
	if c := connect(nil); c != nil {
		t.Fatal("a kubelet without an API server has pods there")
	}
	write(1) // nobody answers there
	s.Kubeconfig.Value = file
	first := connect(nil)
	if first == nil || first.as.node != "one" || connect(nil) != first {
		t.Fatalf("%+v is not kept, or not of this node", first)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if connect(os.ErrNotExist) != first {
		t.Error("what was known is given up as soon as the file can't be read")
	}
	write(2)
	second := connect(nil)
	if second == first {
		t.Fatal("another API server, and the pods are still the first one's")
	}
	first.running.Wait() // hangs if it goes on
	s.NodeName.Value = "two"
	third := connect(nil)
	if third == second || third.as.node != "two" {
		t.Errorf("the node has another name, and the pods are those of %q", third.as.node)
	}
	s.Kubeconfig.Value = ""
	if connect(nil) != nil {
		t.Error("the kubelet has no API server any more, and its pods are known")
	}
	third.running.Wait()
}
