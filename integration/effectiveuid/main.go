// Command effectiveuid says as whom it runs. As a set-user-ID program in an image it shows whether a container may gain
// privileges.
package main

import (
	"fmt"
	"os"
)

func main() { fmt.Printf("Effective uid: %d\n", os.Geteuid()) }
