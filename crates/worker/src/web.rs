//! A GET on the web: one connection, one request, at any http or https address.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, header};
use http_body_util::Full;
use hyper::body::Incoming;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use url::Url;

use crate::connection::{handshake, tls_config};
use crate::{ClientError, ClientSettings};

/// Asks addresses on the web; trusts the certificates that browsers trust.
pub struct Web {
    tls: TlsConnector,
}

impl Web {
    /// Makes ready; connects to nothing.
    pub fn new() -> Result<Self, ClientError> {
        let config = tls_config(&ClientSettings::default())?;
        Ok(Self { tls: TlsConnector::from(Arc::new(config)) })
    }

    /// Asks over a connection that whoever opened it chose the address of. Redirections are not
    /// followed; what went wrong is for people.
    pub async fn get(
        &self,
        stream: TcpStream,
        url: &Url,
        headers: HeaderMap,
    ) -> Result<Response<Incoming>, String> {
        let broken = |error: String| format!("the address does not speak HTTP: {error}");
        let mut sender = if url.scheme() == "https" {
            let name = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let name = ServerName::try_from(name)
                .map_err(|_| "the address has no name that TLS knows".to_owned())?;
            let stream = self.tls.connect(name, stream).await;
            handshake(stream.map_err(|error| format!("TLS: {error}"))?).await.map_err(broken)?
        } else {
            handshake(stream).await.map_err(broken)?
        };
        let mut target = url.path().to_owned();
        if let Some(query) = url.query() {
            target = format!("{target}?{query}");
        }
        let host = url.host_str().unwrap_or_default();
        let host = url.port().map_or(host.to_owned(), |port| format!("{host}:{port}"));
        let mut request = Request::get(target)
            .header(header::HOST, host)
            .header(header::USER_AGENT, concat!("skep/", env!("CARGO_PKG_VERSION")))
            .body(Full::<Bytes>::default())
            .map_err(|error| format!("the address cannot be asked: {error}"))?;
        request.headers_mut().extend(headers);
        sender.send_request(request).await.map_err(|error| broken(error.to_string()))
    }
}
