package agent

import (
	"fmt"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/cleave-cri/cleave/config"
)

// NewLog returns a logger that writes to standard error as configured.
func NewLog(c config.Log) (*zap.Logger, error) {
	level, err := zapcore.ParseLevel(c.Level)
	if err != nil {
		return nil, fmt.Errorf("set up the log: %w", err)
	}
	cfg := zap.NewProductionConfig()
	cfg.Level = zap.NewAtomicLevelAt(level)
	cfg.Encoding = c.Format
	cfg.DisableStacktrace = true
	cfg.Sampling = nil
	cfg.EncoderConfig.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	if c.Format == "console" {
		cfg.EncoderConfig.EncodeLevel = zapcore.CapitalLevelEncoder
	}
	log, err := cfg.Build()
	if err != nil {
		return nil, fmt.Errorf("set up the log: %w", err)
	}
	return log, nil
}
