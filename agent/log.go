package agent

import (
	"fmt"
	"os"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/cleave-cri/cleave/config"
)

// NewLog returns a logger that writes to standard error as configured. It never
// blocks; what nobody reads is dropped and counted. Sync it before the end of
// the process.
func NewLog(c config.Log) (*zap.Logger, error) {
	level, err := zapcore.ParseLevel(c.Level)
	if err != nil {
		return nil, fmt.Errorf("set up the log: %w", err)
	}
	encoding := zap.NewProductionEncoderConfig()
	encoding.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	encoder := zapcore.NewJSONEncoder(encoding)
	if c.Format == "console" {
		encoding.EncodeLevel = zapcore.CapitalLevelEncoder
		encoder = zapcore.NewConsoleEncoder(encoding)
	}
	return zap.New(zapcore.NewCore(encoder, newLogQueue(os.Stderr), level), zap.AddCaller()), nil
}
