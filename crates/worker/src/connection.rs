//! One HTTP/1.1 connection to a hive, plain or TLS, kept open between requests.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use url::Url;

use crate::{ClientError, ClientSettings};

const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// Where a hive is and how to know that it is the right one.
pub(crate) struct Target {
    pub(crate) url: Url,
    pub(crate) authority: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Target {
    pub(crate) fn new(settings: &ClientSettings) -> Result<Self, ClientError> {
        let wrong = |why: &dyn std::fmt::Display| {
            ClientError::Settings(format!(
                "`{}` is not a hive's address: {why}; addresses look like http://127.0.0.1:29500",
                settings.url
            ))
        };
        let url = Url::parse(&settings.url).map_err(|error| wrong(&error))?;
        let host = url.host_str().ok_or_else(|| wrong(&"it has no host"))?.to_owned();
        // A `Url` forgets a port that is its scheme's usual one, which is not ours.
        let written = settings.url.parse().ok().and_then(|uri: http::Uri| uri.port_u16());
        let port = written.or(url.port()).unwrap_or(skep_wire::DEFAULT_PORT);
        let tls = match url.scheme() {
            "http" => None,
            "https" => {
                let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())
                    .map_err(|error| wrong(&error))?;
                Some((TlsConnector::from(Arc::new(tls_config(settings)?)), name))
            }
            other => return Err(wrong(&format!("`{other}` is neither http nor https"))),
        };
        Ok(Self { url, authority: format!("{host}:{port}"), tls })
    }

    pub(crate) async fn connect(&self) -> Result<Connection, ClientError> {
        let unreachable = |reason: String| ClientError::Unreachable {
            url: self.url.as_str().trim_end_matches('/').to_owned(),
            reason,
        };
        let opened = tokio::time::timeout(CONNECT_DEADLINE, self.open()).await;
        match opened {
            Ok(Ok(sender)) => Ok(Connection { sender }),
            Ok(Err(reason)) => Err(unreachable(reason)),
            Err(_) => Err(unreachable("no answer in 10 seconds".to_owned())),
        }
    }

    async fn open(&self) -> Result<SendRequest<Full<Bytes>>, String> {
        let stream =
            TcpStream::connect(&self.authority).await.map_err(|error| error.to_string())?;
        let _ = stream.set_nodelay(true);
        match &self.tls {
            None => handshake(stream).await,
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await;
                handshake(stream.map_err(|error| format!("TLS: {error}"))?).await
            }
        }
    }
}

pub(crate) async fn handshake<S>(stream: S) -> Result<SendRequest<Full<Bytes>>, String>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(1 << 20)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    tokio::spawn(async move {
        // How the connection ends shows in the request that it served.
        let _ = connection.await;
    });
    Ok(sender)
}

/// An open connection.
pub(crate) struct Connection {
    sender: SendRequest<Full<Bytes>>,
}

impl Connection {
    pub(crate) fn is_usable(&self) -> bool {
        !self.sender.is_closed()
    }

    pub(crate) async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, String> {
        self.sender.ready().await.map_err(|error| error.to_string())?;
        self.sender.send_request(request).await.map_err(|error| error.to_string())
    }
}

pub(crate) fn tls_config(settings: &ClientSettings) -> Result<ClientConfig, ClientError> {
    let wrong = |error: &dyn std::fmt::Display| ClientError::Settings(format!("TLS: {error}"));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&error))?;
    if let Some(pin) = &settings.pin {
        let hex = pin.strip_prefix("sha256:").unwrap_or(pin).to_ascii_lowercase();
        if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(wrong(&"a pin is `sha256:` and 64 hexadecimal digits"));
        }
        let verifier = Arc::new(Pinned { hex, provider });
        return Ok(builder
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth());
    }
    let mut roots = RootCertStore::empty();
    match &settings.authority {
        Some(path) => {
            let certificates = CertificateDer::pem_file_iter(path)
                .and_then(Iterator::collect::<Result<Vec<_>, _>>)
                .map_err(|error| wrong(&format!("{}: {error}", path.display())))?;
            for certificate in certificates {
                roots.add(certificate).map_err(|error| wrong(&error))?;
            }
        }
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Trusts one certificate, by its hash, whatever it says about itself.
#[derive(Debug)]
struct Pinned {
    hex: String,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _chain: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let digest = Sha256::digest(certificate.as_ref());
        let found: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        if found == self.hex {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(rustls::Error::General(format!(
                "the hive's certificate is sha256:{found}, not the pinned one"
            )))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_written_down_is_the_port() {
        for (url, authority) in [
            ("http://hive", "hive:29500"),
            ("https://hive/", "hive:29500"),
            ("https://hive:443", "hive:443"),
            ("http://hive:80/", "hive:80"),
            ("http://10.0.0.1:29501", "10.0.0.1:29501"),
            ("https://[::1]:443", "[::1]:443"),
        ] {
            let settings = ClientSettings { url: url.to_owned(), ..ClientSettings::default() };
            let target = Target::new(&settings).expect("a good address");
            assert_eq!(target.authority, authority, "{url}");
        }
    }
}
