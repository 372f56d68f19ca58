package kubelet

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// otherFlags are the flags of kubelet v1.37.2 that are not looked at but take a
// value: without their names the argument after them could be taken for another
// flag.
const otherFlags = `allowed-unsafe-sysctls authentication-token-webhook-cache-ttl authorization-mode
authorization-webhook-cache-authorized-ttl authorization-webhook-cache-unauthorized-ttl bootstrap-kubeconfig cert-dir
client-ca-file cloud-provider cluster-dns cluster-domain cpu-cfs-quota-period cpu-manager-policy cpu-manager-policy-options
cpu-manager-reconcile-period event-burst event-qps experimental-mounter-path file-check-frequency hairpin-mode
healthz-bind-address healthz-port housekeeping-interval http-check-frequency
image-credential-provider-bin-dir image-credential-provider-config kube-api-burst kube-api-content-type kube-api-qps
kubelet-cgroups lock-file log-flush-frequency log-json-info-buffer-size
log-text-info-buffer-size logging-format manifest-url manifest-url-header max-open-files max-pods memory-manager-policy
node-ip node-labels node-status-max-images node-status-update-frequency oom-score-adj pod-cidr pod-max-pids pods-per-core
provider-id qos-reserved register-with-taints registry-burst registry-qps reserved-cpus reserved-memory
resolv-conf runtime-cgroups runtime-request-timeout streaming-connection-idle-timeout sync-frequency system-cgroups
tls-cert-file tls-cipher-suites tls-min-version tls-private-key-file topology-manager-policy
topology-manager-policy-options topology-manager-scope vmodule volume-plugin-dir volume-stats-agg-period`

// otherSwitches are those that need no value.
const otherSwitches = `anonymous-auth authentication-token-webhook cgroups-per-qos contention-profiling cpu-cfs-quota
enable-controller-attach-detach enable-debugging-handlers enable-server exit-on-lock-contention fail-cgroupv1 fail-swap-on
kernel-memcg-notification log-json-split-stream log-text-split-stream make-iptables-util-chains protect-kernel-defaults
register-node rotate-certificates rotate-server-certificates runonce seccomp-default serialize-image-pulls version`

// commandLine is what the arguments of a kubelet say about its files.
type commandLine struct {
	// config and configDir are the flags of those names; empty means none.
	config, configDir string
	unknown           []string
}

// parseArgs reads the arguments of a kubelet, without its name, into fields; a
// setting that no flag names is left as it is. The kubelet uses the same library.
func parseArgs(args []string, fields []field) (commandLine, error) {
	var c commandLine
	flags := pflag.NewFlagSet("kubelet", pflag.ContinueOnError)
	flags.Usage = func() {}
	flags.SetInterspersed(true)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	flags.StringVar(&c.config, "config", "", "")
	flags.StringVar(&c.configDir, "config-dir", "", "")
	for _, f := range fields {
		if f.flag == "" {
			continue
		}
		added := flags.VarPF(&flagValue{slot: f.slot, name: f.flag}, f.flag, "", "")
		if _, ok := f.slot.(*boolSlot); ok {
			added.NoOptDefVal = "true"
		}
	}
	for name := range strings.FieldsSeq(otherFlags) {
		flags.Var(ignored{}, name, "")
	}
	for name := range strings.FieldsSeq(otherSwitches) {
		flags.VarPF(ignored{}, name, "", "").NoOptDefVal = "true"
	}
	flags.VarP(ignored{}, "v", "v", "")
	flags.VarPF(ignored{}, "help", "h", "").NoOptDefVal = "true"

	if err := flags.Parse(args); err != nil {
		return commandLine{}, fmt.Errorf("read the kubelet's arguments: %w", err)
	}
	if rest := flags.Args(); len(rest) > 0 {
		return commandLine{}, fmt.Errorf("read the kubelet's arguments: %s is no flag, and a kubelet takes nothing else", shown(rest[0]))
	}
	c.unknown = unknownFlags(args, flags)
	return c, nil
}

// unknownFlags names the flags that the library passed over. A value that looks
// like a flag may be among them.
func unknownFlags(args []string, flags *pflag.FlagSet) []string {
	var out []string
	for i := 0; i < len(args); i++ {
		name, isLong := strings.CutPrefix(args[i], "--")
		if !isLong || name == "" {
			continue
		}
		name, _, hasValue := strings.Cut(name, "=")
		f := flags.Lookup(name)
		switch {
		case f == nil:
			out = append(out, "--"+name)
		case !hasValue && f.NoOptDefVal == "":
			i++ // the next argument is its value
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// flagValue lets the library write into a slot.
type flagValue struct {
	slot  slot
	name  string
	given bool
}

var _ pflag.Value = (*flagValue)(nil)

func (f *flagValue) Set(s string) error {
	first := !f.given
	f.given = true
	return f.slot.parse(s, first, Origin{Kind: Flag, Name: "--" + f.name})
}

func (*flagValue) String() string { return "" }
func (*flagValue) Type() string   { return "value" }

// ignored takes any value and forgets it.
type ignored struct{}

func (ignored) Set(string) error { return nil }
func (ignored) String() string   { return "" }
func (ignored) Type() string     { return "value" }
