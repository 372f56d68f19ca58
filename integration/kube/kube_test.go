package kube

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/cleave-cri/cleave/agent/decide"
	"github.com/cleave-cri/cleave/doctor"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/kube"
	"github.com/cleave-cri/cleave/kube/evict"
	"github.com/cleave-cri/cleave/kube/report"
	"github.com/cleave-cri/cleave/kube/rights"
	lab "github.com/cleave-cri/cleave/lab/kube"
	"github.com/cleave-cri/cleave/lab/need"
)

// cluster is a control plane; its admin stands for everybody else in the cluster.
type cluster struct {
	plane *lab.ControlPlane
	admin kubernetes.Interface
}

// TestKube starts one control plane for all of it. The parts use nodes and namespaces of their own.
func TestKube(t *testing.T) {
	t.Parallel()
	need.Root(t)
	run := need.Lab(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	paths, err := bin.Get(ctx, os.Stderr, "apiserver", "etcd")
	if err != nil {
		t.Fatal(err)
	}
	plane, err := lab.StartControlPlane(ctx, lab.ControlPlaneOptions{
		Dir: filepath.Join(run.Dir(), "plane"), APIServer: paths[0], Etcd: paths[1], Env: run.Env(), Restrict: true, Audit: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("API server's log:\n%s", plane.LogTail())
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		if err := plane.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	c := &cluster{plane: plane, admin: plane.Client()}
	t.Run("together", func(t *testing.T) {
		t.Run("rights", c.testRights)
		t.Run("node's own identity", c.testNodeIdentity)
		t.Run("successor", c.testSuccessor)
		t.Run("budgets", c.testBudgets)
		t.Run("absurd pods", c.testAbsurdPods)
		t.Run("storm", c.testStorm)
		t.Run("token ends", c.testTokenEnds)
	})
	// It takes the server away; the one that is started then remembers no changes from before.
	t.Run("server away", c.testServerAway)
	t.Run("410 Gone", c.testGone)
	t.Run("a thousand pods", c.testThousandPods)
	c.checkAudit(t)
}

// node makes a node object.
func (c *cluster) node(t *testing.T, name string) {
	t.Helper()
	if _, err := c.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// create makes a pod on a node.
func (c *cluster) create(t *testing.T, node, name string, change ...func(*corev1.Pod)) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{"name": name}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "none"}}},
	}
	for _, f := range change {
		f(pod)
	}
	made, err := c.admin.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// The API server evicts pending pods without asking a budget.
	made.Status.Phase = corev1.PodRunning
	made.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if made, err = c.admin.CoreV1().Pods(pod.Namespace).UpdateStatus(t.Context(), made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return made
}

// ends takes the kubelet's part at the end of a node's pods: what is to go is gone.
func (c *cluster) ends(t *testing.T, node string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			list, err := c.admin.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
			if err == nil {
				for _, p := range list.Items {
					if now := int64(0); p.DeletionTimestamp != nil {
						_ = c.admin.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &p.UID}}) //nolint:errcheck // the next round does it
					}
				}
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
}

// budget lets no pod of a label go.
func (c *cluster) budget(t *testing.T, name string, pods string) {
	t.Helper()
	all := intstr.FromString("100%")
	b, err := c.admin.PolicyV1().PodDisruptionBudgets("default").Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"name": pods}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// No controller does it.
	b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, ExpectedPods: 1, DesiredHealthy: 1, CurrentHealthy: 1}
	if _, err := c.admin.PolicyV1().PodDisruptionBudgets("default").UpdateStatus(t.Context(), b, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// role is the one that is deployed.
func role(t *testing.T) (rules []rbacv1.PolicyRule, text string) {
	t.Helper()
	data, err := os.ReadFile("../../deploy/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for part := range strings.SplitSeq(string(data), "\n---\n") {
		var r rbacv1.ClusterRole
		if err := yaml.Unmarshal([]byte(part), &r); err != nil {
			t.Fatal(err)
		}
		if r.Kind == "ClusterRole" {
			return r.Rules, string(data)
		}
	}
	t.Fatal("deploy/rbac.yaml has no ClusterRole")
	return nil, ""
}

// each gives the single rights of rules.
func each(rules []rbacv1.PolicyRule) []rights.Right {
	var out []rights.Right
	for _, r := range rules {
		for _, group := range r.APIGroups {
			for _, name := range r.Resources {
				for _, verb := range r.Verbs {
					resource, sub, _ := strings.Cut(name, "/")
					out = append(out, rights.Right{Verb: verb, Group: group, Resource: resource, Subresource: sub})
				}
			}
		}
	}
	return out
}

// account makes a service account with a role of its own, and gives its client.
func (c *cluster) account(t *testing.T, name, node string, allowed []rights.Right) *kube.Client {
	t.Helper()
	return c.client(t, c.plane.As(c.token(t, name, allowed)), node, len(allowed))
}

// token makes a service account with a role of its own, and gives a token of it.
func (c *cluster) token(t *testing.T, name string, allowed []rights.Right) string {
	t.Helper()
	ctx := t.Context()
	var rules []rbacv1.PolicyRule
	for _, r := range allowed {
		resource := r.Resource
		if r.Subresource != "" {
			resource += "/" + r.Subresource
		}
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{r.Group}, Resources: []string{resource}, Verbs: []string{r.Verb}})
	}
	meta := metav1.ObjectMeta{Name: name}
	_, err := c.admin.CoreV1().ServiceAccounts("default").Create(ctx, &corev1.ServiceAccount{ObjectMeta: meta}, metav1.CreateOptions{})
	if err == nil {
		_, err = c.admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = c.admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: name, Namespace: "default"}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	token, err := c.admin.CoreV1().ServiceAccounts("default").CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return token.Status.Token
}

// client is one that has so many of the rights.
func (c *cluster) client(t *testing.T, cfg *rest.Config, node string, allowed int) *kube.Client {
	t.Helper()
	client, err := kube.NewClientFor(cfg, node, true)
	if err != nil {
		t.Fatal(err)
	}
	// The server learns of roles by watching.
	eventually(t, "the role holds", func(ctx context.Context) error {
		missing, err := rights.Missing(ctx, client)
		if err == nil && len(missing) != len(rights.All())-allowed {
			err = fmt.Errorf("missing: %v", missing)
		}
		return err
	})
	return client
}

// testRights: the deployed role is what the code says it needs, each rule with its reason; without each single right the feature
// that it is for is lost and nothing else, and doctor says which.
func (c *cluster) testRights(t *testing.T) {
	t.Parallel()
	rules, text := role(t)
	names := func(list []rights.Right) []string {
		var out []string
		for _, r := range list {
			out = append(out, r.String())
		}
		slices.Sort(out)
		return out
	}
	all := each(rules)
	if got, want := names(all), names(rights.All()); !slices.Equal(got, want) {
		t.Fatalf("deploy/rbac.yaml gives %q, cleave needs %q", got, want)
	}
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, "  - apiGroups") && !strings.HasPrefix(lines[i-1], "  #") {
			t.Errorf("deploy/rbac.yaml:%d: the rule has no comment", i+1)
		}
	}
	t.Run("with all", func(t *testing.T) {
		t.Parallel()
		c.lose(t, "with-all", all, "")
	})
	for _, r := range rights.All() {
		t.Run("without "+r.String(), func(t *testing.T) {
			t.Parallel()
			rest := slices.DeleteFunc(slices.Clone(all), func(other rights.Right) bool { return other.String() == r.String() })
			c.lose(t, "without-"+strings.NewReplacer(" ", "-", "/", "-", ".", "-").Replace(r.String()), rest, r.String(), r.Features...)
		})
	}
}

// lose uses all features with some rights and compares what is lost.
func (c *cluster) lose(t *testing.T, name string, allowed []rights.Right, missing string, want ...rights.Feature) {
	t.Helper()
	c.node(t, name)
	c.ends(t, name)
	client := c.account(t, name, name, allowed)
	got := c.use(t, client, name)
	var lost []rights.Feature
	for f, err := range got {
		if err != nil {
			lost = append(lost, f)
		}
	}
	if missing == "list pods" {
		want = nil // this server answers lists by way of a watch
	}
	slices.Sort(lost)
	slices.Sort(want)
	if !slices.Equal(lost, want) {
		t.Errorf("lost %q, want %q: %v", lost, want, got)
	}
	result := rights.Check(client).Run(t.Context())
	if (missing == "") != (result.Level == doctor.Pass) || !strings.Contains(result.Reason, missing) {
		t.Errorf("doctor says %+v", result)
	}
}

// use tries every feature and says which fail. Those that fail must say that a right is missing.
func (c *cluster) use(t *testing.T, client *kube.Client, node string) map[rights.Feature]error {
	t.Helper()
	ctx := t.Context()
	out := map[rights.Feature]error{}
	soft, hard := c.create(t, node, node+"-soft"), c.create(t, node, node+"-hard")
	c.budget(t, node, hard.Name)
	source, stop := watching(t, client)
	defer stop()
	known := map[string]kube.Pod{}
	eventually(t, "pods are known or refused", func(context.Context) error {
		s := source.Pods()
		for _, p := range s.Pods {
			known[p.Name] = *p
		}
		out[rights.Pods] = nil
		if s.Problem != "" {
			out[rights.Pods] = errors.New(s.Problem)
			if strings.Contains(s.Problem, "forbidden") {
				return nil
			}
		}
		if s.AsOf.IsZero() || len(known) < 2 {
			return fmt.Errorf("known: %+v", s)
		}
		return nil
	})
	for _, p := range []*corev1.Pod{soft, hard} {
		if client.ServiceAccount() {
			break
		}
		eventually(t, "the Node authorizer knows the pod", func(ctx context.Context) error {
			_, err := client.Pod(ctx, p.Namespace, p.Name)
			return err
		})
	}
	order := func(p *corev1.Pod) kube.Pod {
		if k, ok := known[p.Name]; ok {
			return k
		}
		// As another source would have it.
		return kube.Pod{UID: string(p.UID), APIUID: string(p.UID), Namespace: p.Namespace, Name: p.Name}
	}
	evictor := evict.New(client, evict.Options{})
	_, out[rights.Soft] = evictor.Evict(ctx, evict.Order{Pod: order(soft)})
	outcome, err := evictor.Evict(ctx, evict.Order{Pod: order(hard), Hard: true})
	out[rights.Hard] = err
	if err == nil && outcome.Way != evict.ByDeletion {
		t.Errorf("a pod with a budget went by %q", outcome.Way)
	}
	out[rights.Events] = twoEvents(ctx, client, node)
	out[rights.Conditions] = report.NewConditions(client).Set(ctx, report.ImageFS, true, "1 Gi of 10 Gi left")
	out[rights.Taint] = errors.Join(report.Taint(ctx, client, client.ServiceAccount(), true), report.Taint(ctx, client, client.ServiceAccount(), false))
	_, out[rights.Compare] = client.NodeObject(ctx)
	for f, err := range out {
		if err != nil && !kube.Denied(err) && !strings.Contains(err.Error(), "forbidden") && !errors.Is(err, report.ErrIdentity) {
			t.Errorf("%s: %v, which does not say that a right is missing", f, err)
		}
	}
	return out
}

// twoEvents tells an event, and that it has happened again.
func twoEvents(ctx context.Context, client *kube.Client, node string) error {
	e := &eventsv1.Event{
		TypeMeta:   metav1.TypeMeta{APIVersion: "events.k8s.io/v1", Kind: "Event"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: node + ".1"}, EventTime: metav1.NowMicro(), Type: "Warning", Reason: string(report.ThresholdMet),
		Action: "Watching", ReportingController: report.Controller, ReportingInstance: "cleave-" + node, Note: "short",
		Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node},
	}
	err := client.CreateEvent(ctx, e)
	if err != nil {
		return err
	}
	e.Series = &eventsv1.EventSeries{Count: 2, LastObservedTime: metav1.NowMicro()}
	return client.PatchEvent(ctx, e)
}

// watching runs a source.
func watching(t *testing.T, client *kube.Client) (*kube.Watch, func()) {
	t.Helper()
	w := kube.NewWatch(client)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		_ = w.Run(ctx) //nolint:errcheck // the context's
		close(done)
	}()
	return w, func() { cancel(); <-done }
}

// testNodeIdentity: with a node's own identity all goes but the taint, and only for its own pods.
func (c *cluster) testNodeIdentity(t *testing.T) {
	t.Parallel()
	c.node(t, lab.NodeName)
	c.node(t, "other-node")
	c.ends(t, lab.NodeName)
	client, err := kube.NewClientFor(c.plane.AsNode(), lab.NodeName, false)
	if err != nil {
		t.Fatal(err)
	}
	for f, err := range c.use(t, client, lab.NodeName) {
		if (err != nil) != (f == rights.Taint) {
			t.Errorf("%s: %v", f, err)
		}
	}
	if result := rights.Check(client).Run(t.Context()); result.Level != doctor.Pass {
		t.Errorf("doctor says %+v", result)
	}
	theirs := c.create(t, "other-node", "on-another-node")
	if err := client.EvictPod(t.Context(), "default", theirs.Name, string(theirs.UID), 1); !apierrors.IsForbidden(err) {
		t.Errorf("another node's pod: %v", err)
	}
	other, err := kube.NewClientFor(c.plane.AsNode(), "other-node", false)
	if err != nil {
		t.Fatal(err)
	}
	source, stop := watching(t, other)
	defer stop()
	eventually(t, "another node's pods are refused", func(context.Context) error {
		if s := source.Pods(); !strings.Contains(s.Problem, "forbidden") || len(s.Pods) > 0 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// full is a client with the deployed role.
func (c *cluster) full(t *testing.T, node string) *kube.Client {
	t.Helper()
	rules, _ := role(t)
	c.node(t, node)
	return c.account(t, node, node, each(rules))
}

// testSuccessor: a pod of the same name, as a StatefulSet makes it, is never hit in place of the one that was meant.
func (c *cluster) testSuccessor(t *testing.T) {
	t.Parallel()
	const node = "successor-node"
	client := c.full(t, node)
	c.ends(t, node)
	first := c.create(t, node, "db-0")
	order := evict.Order{Hard: true, Pod: kube.Pod{UID: string(first.UID), APIUID: string(first.UID), Namespace: "default", Name: "db-0"}}
	if _, err := evict.New(client, evict.Options{}).Evict(t.Context(), order); err != nil {
		t.Fatal(err)
	}
	second := c.create(t, node, "db-0")
	if out, err := evict.New(client, evict.Options{}).Evict(t.Context(), order); !errors.Is(err, evict.ErrNotThis) || out.Calls != 0 {
		t.Errorf("%+v, %v", out, err)
	}
	// Even if the last look came too early.
	if err := client.EvictPod(t.Context(), "default", "db-0", string(first.UID), 1); !apierrors.IsConflict(err) {
		t.Errorf("evict by an old UID: %v", err)
	}
	if err := client.DeletePod(t.Context(), "default", "db-0", string(first.UID), 1); !apierrors.IsConflict(err) {
		t.Errorf("delete by an old UID: %v", err)
	}
	now, err := c.admin.CoreV1().Pods("default").Get(t.Context(), "db-0", metav1.GetOptions{})
	if err != nil || now.UID != second.UID || now.DeletionTimestamp != nil {
		t.Errorf("the successor: %+v, %v", now, err)
	}
}

// testBudgets: a budget keeps a pod from soft evictions for good and from hard ones for a while; two budgets, to which the API server
// has no answer, do the same.
func (c *cluster) testBudgets(t *testing.T) {
	t.Parallel()
	const node = "budget-node"
	client := c.full(t, node)
	c.ends(t, node)
	evictor := evict.New(client, evict.Options{})
	for _, budgets := range []int{0, 1, 2} {
		name := fmt.Sprintf("with-%d-budgets", budgets)
		p := c.create(t, node, name)
		for i := range budgets {
			c.budget(t, fmt.Sprintf("%s-%d", name, i), name)
		}
		pod := kube.Pod{UID: string(p.UID), APIUID: string(p.UID), Namespace: "default", Name: name}
		if budgets > 0 {
			out, err := evictor.Evict(t.Context(), evict.Order{Pod: pod})
			if !errors.Is(err, evict.ErrBudget) || out.Way != "" {
				t.Errorf("%s, soft: %+v, %v", name, out, err)
			}
			if _, err := evict.New(client, evict.Options{NoDirectDeletion: true}).Evict(t.Context(), evict.Order{Pod: pod, Hard: true}); err == nil {
				t.Errorf("%s went although it may not be deleted", name)
			}
			if now, err := c.admin.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil || now.DeletionTimestamp != nil {
				t.Fatalf("%s after refusals: %+v, %v", name, now, err)
			}
		}
		out, err := evictor.Evict(t.Context(), evict.Order{Pod: pod, Hard: true})
		want := evict.Outcome{Way: evict.ByEviction, Calls: 1}
		switch budgets {
		case 1:
			want = evict.Outcome{Way: evict.ByDeletion, Calls: 4, Refusals: 3}
		case 2:
			want = evict.Outcome{Way: evict.ByDeletion, Calls: 2}
		}
		if err != nil || out.Way != want.Way || out.Calls != want.Calls || out.Refusals != want.Refusals || out.GoneAt == nil {
			t.Errorf("%s, hard: %+v, %v; want %+v", name, out, err, want)
		}
	}
}

// testAbsurdPods: what the API server lets in is read as it is meant or as a fault, and hides no other pod.
func (c *cluster) testAbsurdPods(t *testing.T) {
	t.Parallel()
	const node = "absurd-node"
	client := c.full(t, node)
	request := func(text string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceEphemeralStorage: resource.MustParse(text)}
		}
	}
	c.create(t, node, "usual", request("1Gi"))
	c.create(t, node, "huge", request("9223372036854775807"))
	c.create(t, node, "larger", request("1e30"))
	c.create(t, node, "fine", request("1500m"))
	c.create(t, node, "nothing", request("0"))
	c.create(t, node, "silent")
	source, stop := watching(t, client)
	defer stop()
	eventually(t, "all are known", func(context.Context) error {
		if s := source.Pods(); len(s.Pods) != 6 || s.Problem != "" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	got := map[string]string{}
	for _, p := range source.Pods().Pods {
		got[p.Name] = "not known"
		if q := p.Containers[0].Requests.EphemeralStorage; q != nil {
			got[p.Name] = q.String()
		}
		if len(p.Faults) > 0 {
			t.Errorf("%s: %q", p.Name, p.Faults)
		}
	}
	for name, want := range map[string]string{"usual": "1Gi", "huge": "9223372036854775807", "larger": "1e30", "fine": "1500m", "nothing": "0", "silent": "not known"} {
		if got[name] != want {
			t.Errorf("%s requests %s, want %s", name, got[name], want)
		}
	}
}

// testServerAway: without a server nothing is evicted, what was known stays known and gets older, and when the server is back all goes
// on by itself.
func (c *cluster) testServerAway(t *testing.T) {
	const node = "away-node"
	rules, _ := role(t)
	c.node(t, node)
	client := c.account(t, node, node, each(rules))
	c.ends(t, node)
	p := c.create(t, node, "stays")
	source, stop := watching(t, client)
	defer stop()
	knows := func(n int) func(context.Context) error {
		return func(context.Context) error {
			if s := source.Pods(); len(s.Pods) != n || s.Problem != "" {
				return fmt.Errorf("%+v", s)
			}
			return nil
		}
	}
	eventually(t, "the pod is known", knows(1))
	before := source.Pods().AsOf
	if err := c.plane.KillServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the server is missed", func(context.Context) error {
		if s := source.Pods(); s.Problem == "" || len(s.Pods) != 1 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	away := source.Pods().AsOf
	out, err := evict.New(client, evict.Options{}).Evict(t.Context(), evict.Order{Hard: true, Pod: kube.Pod{UID: string(p.UID), APIUID: string(p.UID), Namespace: "default", Name: p.Name}})
	if !errors.Is(err, evict.ErrUnreachable) || out.Way != "" {
		t.Errorf("evicted without a server: %+v, %v", out, err)
	}
	if got := source.Pods().AsOf; !got.Equal(away) || got.Before(before) {
		t.Errorf("what is known is of %s, was of %s, although nobody answers", got, away)
	}
	if result := rights.Check(client).Run(t.Context()); result.Level != doctor.Warn || !strings.Contains(result.Reason, "nothing is known about rights") {
		t.Errorf("doctor says %+v", result)
	}
	if os.Getenv(longEnv) != "" {
		eventually(t, "it is away for a minute", func(context.Context) error {
			if age := time.Since(away); age < time.Minute {
				return fmt.Errorf("it is away for %s", age)
			}
			return nil
		})
	}
	// What is known goes on to count, marked as old, up to a limit; then nobody can be evicted by it.
	if pods, left := decide.Pods(kube.Merge(source.Pods()), away.Add(time.Minute), 59*time.Second); len(pods) != 0 || len(left) != 1 || !strings.Contains(left[0], "known from 1m0s ago") {
		t.Errorf("beyond the limit %+v, %q", pods, left)
	}
	c.holdsAtTheLimit(t, &filled{source: source, evictor: evict.New(client, evict.Options{})}, string(p.UID))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := c.plane.StartServer(ctx); err != nil {
		t.Fatal(err)
	}
	c.create(t, node, "new")
	eventually(t, "the server is back", knows(2))
	if now, err := c.admin.CoreV1().Pods("default").Get(t.Context(), p.Name, metav1.GetOptions{}); err != nil || now.UID != p.UID || now.DeletionTimestamp != nil {
		t.Errorf("the pod: %+v, %v", now, err)
	}
	// A token that nobody takes any more: known pods stay, and it is said.
	broken, err := kube.NewClientFor(&rest.Config{Host: c.plane.REST().Host, BearerToken: "expired", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}, node, true)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := evict.New(broken, evict.Options{}).Evict(t.Context(), evict.Order{Hard: true, Pod: kube.Pod{UID: string(p.UID), APIUID: string(p.UID), Namespace: "default", Name: p.Name}}); !errors.Is(err, evict.ErrDenied) || out.Calls != 0 {
		t.Errorf("with an expired token: %+v, %v", out, err)
	}
}

// holdsAtTheLimit: on a node whose disk is short decisions go on without a server, and name the pod that would go, which stays, as nobody
// ends it; when what is known is too old, nobody is named any more.
func (c *cluster) holdsAtTheLimit(t *testing.T, f *filled, uid string) {
	t.Helper()
	f.maxAge.Store(int64(time.Hour))
	k := f.keeper(4)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { k.Run(ctx) })
	defer func() { cancel(); running.Wait() }() // before the server is back
	last := func(what string, ok func(engine.Decision) bool) {
		eventually(t, what, func(context.Context) error {
			list := f.seen()
			if len(list) == 0 || !ok(list[len(list)-1].Decision) {
				return fmt.Errorf("after %d passes: %+v", len(list), k.Status())
			}
			return nil
		})
	}
	last("a decision names the pod", func(d engine.Decision) bool { return d.Victim != nil && d.Victim.UID == uid })
	f.maxAge.Store(1)
	last("decisions hold", func(d engine.Decision) bool { return d.Outcome == engine.Pressure && d.NoVictim == "SYN-24" })
}

// testThousandPods: what is kept of as many pods as no node has, each some 20 KB at the API server, is small.
func (c *cluster) testThousandPods(t *testing.T) {
	const node, count, most = "thousand-node", 1000, 25 << 20
	if os.Getenv(longEnv) == "" {
		t.Skip("a thousand pods take half a minute: `make test-kube` makes them")
	}
	client := c.full(t, node)
	var env []corev1.EnvVar
	for i := range 150 {
		env = append(env, corev1.EnvVar{Name: fmt.Sprintf("VARIABLE_%d", i), Value: strings.Repeat("v", 60)})
	}
	cfg := c.plane.REST()
	cfg.QPS = -1
	admin, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var group errgroup.Group
	group.SetLimit(8)
	for i := range count {
		group.Go(func() error {
			_, err := admin.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("one-of-many-%d", i), Annotations: map[string]string{"large": strings.Repeat("a", 4000)}},
				Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "none", Env: env, Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi"), corev1.ResourceEphemeralStorage: resource.MustParse("1Gi")},
				}}}},
			}, metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	before := heap()
	source, stop := watching(t, client)
	defer stop()
	eventually(t, "all are known", func(context.Context) error {
		if s := source.Pods(); len(s.Pods) != count || s.Problem != "" {
			return fmt.Errorf("%d are, %s", len(s.Pods), s.Problem)
		}
		return nil
	})
	grew := heap() - before
	t.Logf("%d pods take %d KiB", count, grew>>10)
	if grew > most {
		t.Errorf("%d pods take %d bytes, want at most %d", count, grew, most)
	}
	runtime.KeepAlive(source)
}

// heap is what the heap holds that is in use.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc) //nolint:gosec // far from it
}

// sleeper breaks off a watch and has it go on from a version that the server has long forgotten, as after a night without network. It
// counts what the server has to say to that.
type sleeper struct {
	next http.RoundTripper
	gone atomic.Int64

	mu    sync.Mutex
	watch *sleepersWatch // guarded by mu; the one that runs
	woken bool           // guarded by mu; the next watch is from long ago
}

// RoundTrip implements [http.RoundTripper].
func (s *sleeper) RoundTrip(r *http.Request) (*http.Response, error) {
	query := r.URL.Query()
	watch := query.Get("watch") != ""
	s.mu.Lock()
	if watch && s.woken && query.Get("sendInitialEvents") == "" {
		s.woken = false
		query.Set("resourceVersion", "1")
		r = r.Clone(r.Context())
		r.URL.RawQuery = query.Encode()
	}
	s.mu.Unlock()
	answer, err := s.next.RoundTrip(r)
	if err != nil || !watch {
		return answer, err
	}
	if answer.StatusCode == http.StatusGone {
		s.gone.Add(1)
	}
	body := &sleepersWatch{ReadCloser: answer.Body, of: s}
	answer.Body = body
	s.mu.Lock()
	s.watch = body
	s.mu.Unlock()
	return answer, nil
}

func (s *sleeper) wake() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.woken = true
	s.watch.over.Store(true)
	return s.watch.Close()
}

type sleepersWatch struct {
	io.ReadCloser
	of   *sleeper
	over atomic.Bool
}

// Read implements [io.Reader]. An event of an error is small enough to come at once. One that is over ends as if the server had ended it.
func (w *sleepersWatch) Read(p []byte) (int, error) {
	n, err := w.ReadCloser.Read(p)
	if bytes.Contains(p[:n], []byte(`"code":410`)) {
		w.of.gone.Add(1)
	}
	if err != nil && w.over.Load() {
		err = io.EOF
	}
	return n, err
}

// testGone: a watch that begins where the server remembers nothing any more gets 410 Gone, and begins anew by itself.
func (c *cluster) testGone(t *testing.T) {
	const node = "gone-node"
	rules, _ := role(t)
	c.node(t, node)
	cfg, s := c.plane.As(c.token(t, node, each(rules))), &sleeper{}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { s.next = next; return s })
	source, stop := watching(t, c.client(t, cfg, node, len(rights.All())))
	defer stop()
	knows := func(names ...string) func(context.Context) error {
		return func(context.Context) error {
			snapshot := source.Pods()
			var got []string
			for _, p := range snapshot.Pods {
				got = append(got, p.Name)
			}
			if slices.Sort(got); !slices.Equal(got, names) || snapshot.Problem != "" || snapshot.AsOf.IsZero() {
				return fmt.Errorf("known are %q; %s", got, snapshot.Problem)
			}
			return nil
		}
	}
	// A watch that ends at once, and brought nothing, is begun with a list instead.
	eventually(t, "it watches", knows())
	first := c.create(t, node, "before-the-night")
	eventually(t, "the pod is known", knows(first.Name))
	if err := s.wake(); err != nil {
		t.Fatal(err)
	}
	c.create(t, node, "in-the-morning")
	now := int64(0)
	if err := c.admin.CoreV1().Pods("default").Delete(t.Context(), first.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what changed meanwhile is known", knows("in-the-morning"))
	if s.gone.Load() == 0 {
		t.Error("the server never said 410 Gone, so that this shows nothing about it")
	}
}

// testTokenEnds: a token that the server takes no more is like one that has expired: nothing is evicted, what is known stays known, it is
// said, and a new one in its file is taken without a restart.
func (c *cluster) testTokenEnds(t *testing.T) {
	t.Parallel()
	const node = "token-node"
	ctx := t.Context()
	rules, _ := role(t)
	c.node(t, node)
	c.token(t, node, each(rules))
	p := c.create(t, node, "stays-with-token")
	// A token is bound to a secret and ends with it: the least time that a token can have is ten minutes.
	bound := func(name string) string {
		secret, err := c.admin.CoreV1().Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		token, err := c.admin.CoreV1().ServiceAccounts("default").CreateToken(ctx, node, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Secret", APIVersion: "v1", Name: name, UID: secret.UID},
		}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return token.Status.Token
	}
	dir := t.TempDir()
	file, kubeconfig := filepath.Join(dir, "token"), filepath.Join(dir, "kubeconfig")
	write := func(path, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(file, bound("first-token"))
	write(kubeconfig, fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n"+
		"clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]\nusers: [{name: u, user: {tokenFile: %q}}]\n", c.plane.REST().Host, file))
	client, err := kube.NewClient(kube.ConnectOptions{Kubeconfig: kubeconfig, ServiceAccount: true, Node: node, UserAgent: "cleave"})
	if err != nil {
		t.Fatal(err)
	}
	source, stop := watching(t, client)
	defer stop()
	eventually(t, "the pod is known", func(context.Context) error {
		if s := source.Pods(); len(s.Pods) != 1 || s.Problem != "" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	if err := c.admin.CoreV1().Secrets("default").Delete(ctx, "first-token", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	// The server remembers for 10 s whom it let in.
	eventually(t, "the token has ended", func(ctx context.Context) error {
		if _, err := client.NodeObject(ctx); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("the answer is %w", err)
		}
		return nil
	})
	pod := kube.Pod{UID: string(p.UID), APIUID: string(p.UID), Namespace: "default", Name: p.Name}
	if out, err := evict.New(client, evict.Options{}).Evict(ctx, evict.Order{Hard: true, Pod: pod}); !errors.Is(err, evict.ErrDenied) || out.Calls != 0 {
		t.Errorf("evicted with a token that has ended: %+v, %v", out, err)
	}
	if s := source.Pods(); len(s.Pods) != 1 {
		t.Errorf("what was known is forgotten: %+v", s)
	}
	write(file, bound("second-token"))
	eventually(t, "the new token is taken", func(ctx context.Context) error {
		_, err := client.NodeObject(ctx)
		return err
	})
	if now, err := c.admin.CoreV1().Pods("default").Get(ctx, p.Name, metav1.GetOptions{}); err != nil || now.DeletionTimestamp != nil {
		t.Errorf("the pod: %+v, %v", now, err)
	}
}

// checkAudit reads what the API server was asked by cleave's identities: pods of their own node and no others, nothing that the role
// has no rule for, and deletions only with a UID.
func (c *cluster) checkAudit(t *testing.T) {
	t.Helper()
	file, err := os.Open(c.plane.AuditLog())
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close() //nolint:errcheck // only read
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	questions := 0
	for lines.Scan() {
		var e struct {
			Verb       string
			RequestURI string
			User       struct{ Username string }
			ObjectRef  *struct{ Resource, Namespace, Name string }
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		account, ours := strings.CutPrefix(e.User.Username, "system:serviceaccount:default:")
		if e.User.Username == "system:node:"+lab.NodeName {
			account, ours = "", true // it also tries what it may not
		}
		if !ours || e.ObjectRef == nil {
			continue
		}
		switch e.Verb {
		case "list", "watch":
			questions++
			if e.ObjectRef.Resource != "pods" || !strings.Contains(e.RequestURI, "fieldSelector=spec.nodeName%3D") {
				t.Errorf("%s asked for %s", e.User.Username, e.RequestURI)
			}
			if account != "" && !strings.Contains(e.RequestURI, "fieldSelector=spec.nodeName%3D"+account+"&") && !strings.HasSuffix(e.RequestURI, "fieldSelector=spec.nodeName%3D"+account) {
				t.Errorf("%s asked for another node's pods: %s", account, e.RequestURI)
			}
		case "deletecollection", "update":
			t.Errorf("%s: %s %s", e.User.Username, e.Verb, e.RequestURI)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if questions < len(rights.All()) {
		t.Errorf("the audit log has only %d questions for pods", questions)
	}
}
