package unixsock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/cleave-cri/cleave/doctor"
)

// CheckAnswers is the check that a server accepts connections on a socket. who
// names the server, remedy says how to start it, and missing is how bad it is
// if it does not.
func CheckAnswers(name, who, path, remedy string, missing doctor.Level) doctor.Check {
	return doctor.Check{Name: name, Run: func(context.Context) doctor.Result {
		not := func(format string, args ...any) doctor.Result {
			return doctor.Result{Level: missing, Reason: fmt.Sprintf(format, args...), Remedy: remedy}
		}
		switch _, err := AccessOf(path); {
		case errors.Is(err, fs.ErrNotExist):
			return not("%s does not exist: %s is not running", path, who)
		case errors.Is(err, ErrNotSocket):
			return doctor.Failed(path+" exists and is not a socket", "move it away, or correct the path in the configuration")
		case err != nil:
			return doctor.Failed(err.Error(), remedy)
		}
		alive, err := Alive(path)
		if err != nil {
			return doctor.Failed(err.Error(), remedy)
		}
		if !alive {
			return not("nobody answers on %s: %s is not running", path, who)
		}
		return doctor.Passed("%s answers on %s", who, path)
	}}
}

// CheckSameAccess is the check that a socket may be used by just those who may
// use the one that it stands for.
func CheckSameAccess(name, path, model string) doctor.Check {
	return doctor.Check{Name: name, Run: func(context.Context) doctor.Result {
		own, err := AccessOf(path)
		want, modelErr := AccessOf(model)
		if err = cmp.Or(err, modelErr); err != nil {
			return doctor.Warned("can't compare: "+err.Error(), "start both servers first")
		}
		if own != want {
			return doctor.Failed(fmt.Sprintf("%s is %v, %s is %v", path, own, model, want),
				"restart cleave; it takes over the owner and the mode of the runtime's socket")
		}
		return doctor.Passed("%s and %s are both %v", path, model, own)
	}}
}

// String gives owner, group and mode: "0:0 0660".
func (a Access) String() string { return fmt.Sprintf("%d:%d %#o", a.UID, a.GID, a.Mode.Perm()) }
