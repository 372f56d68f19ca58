package deputy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"
)

// Identity is what a deputy's server shows and asks for. Without TLS client-go sends
// no token.
type Identity struct {
	// CertPEM and KeyPEM are a certificate for the loopback, which signs itself.
	CertPEM, KeyPEM []byte
	// Token is needed for every call: whoever may make pods is root.
	Token string
}

// newIdentity makes one for the life of a lab.
func newIdentity() (Identity, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Identity{}, fmt.Errorf("make a certificate: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return Identity{}, fmt.Errorf("make a certificate: %w", err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return Identity{}, fmt.Errorf("make a certificate: %w", err)
	}
	return Identity{
		CertPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		KeyPEM:  pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}),
		Token:   rand.Text(),
	}, nil
}

func (i Identity) tls() (*tls.Config, error) {
	pair, err := tls.X509KeyPair(i.CertPEM, i.KeyPEM)
	if err != nil {
		return nil, fmt.Errorf("read the server's certificate: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}, nil
}
