package agent

import (
	"fmt"
	"os"
	"time"

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
	encoder := encoderOf(c.Format)
	return zap.New(zapcore.NewCore(encoder, newLogQueue(os.Stderr, droppedLine(encoder)), level), zap.AddCaller()), nil
}

func encoderOf(format string) zapcore.Encoder {
	encoding := zap.NewProductionEncoderConfig()
	encoding.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	if format == "console" {
		encoding.EncodeLevel = zapcore.CapitalLevelEncoder
		return zapcore.NewConsoleEncoder(encoding)
	}
	return zapcore.NewJSONEncoder(encoding)
}

// droppedLine makes the line that says how many lines were dropped.
func droppedLine(encoder zapcore.Encoder) func(int64) []byte {
	return func(n int64) []byte {
		entry := zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(), Message: "lines of the log were dropped because nobody read them"}
		line, err := encoder.EncodeEntry(entry, []zapcore.Field{zap.Int64("lines", n)})
		if err != nil {
			return nil // can't be for a number; and there is nobody to tell
		}
		defer line.Free()
		return append([]byte(nil), line.Bytes()...)
	}
}
