//! Fetching a picture that a stranger names: capped in size and time, and only from the public
//! internet. A name is resolved once per hop and the connection goes to the very address that was
//! checked, so that a name cannot change its mind in between.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use skep_wire::ErrorCode;
use skep_worker::Web;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use url::{Host, Url};

use crate::address::is_public;
use crate::{ApiError, ServeError};

/// How many fetches may be under way.
const MOST_AT_ONCE: usize = 16;

/// What may be fetched.
#[derive(Clone, Copy, Debug)]
pub struct FetchSettings {
    /// Loopback, private and other special addresses too.
    pub allow_private: bool,
    /// Bytes.
    pub most_bytes: usize,
    /// For everything, redirections included.
    pub deadline: Duration,
    /// How many redirections are followed.
    pub redirects: usize,
}

impl Default for FetchSettings {
    fn default() -> Self {
        Self {
            allow_private: false,
            most_bytes: 10_000_000,
            deadline: Duration::from_secs(10),
            redirects: 3,
        }
    }
}

/// Fetches pictures.
pub struct Fetcher {
    settings: FetchSettings,
    allowed: fn(IpAddr) -> bool,
    web: Web,
    places: Semaphore,
}

enum Step {
    Done(Bytes),
    Elsewhere(Url),
}

fn refuse(message: impl Into<String>) -> ApiError {
    ApiError::bad(message, "open the address in a browser to see what is there")
}

impl Fetcher {
    /// Makes ready; connects to nothing.
    pub fn new(settings: FetchSettings) -> Result<Self, ServeError> {
        let web = Web::new()?;
        let allowed = if settings.allow_private { |_| true } else { is_public };
        Ok(Self { settings, allowed, web, places: Semaphore::new(MOST_AT_ONCE) })
    }

    /// The bytes at an address.
    pub async fn fetch(&self, address: &str) -> Result<Bytes, ApiError> {
        let url = Url::parse(address).map_err(|error| {
            let shown: String = address.chars().take(200).collect();
            ApiError::bad(
                format!("`{shown}` is not an address: {error}"),
                "addresses look like https://example.org/seven.png",
            )
        })?;
        let _place = self
            .places
            .try_acquire()
            .map_err(|_| ApiError::busy("too many fetches are under way"))?;
        let deadline = self.settings.deadline;
        tokio::time::timeout(deadline, self.follow(url)).await.map_err(|_| {
            refuse(format!("the address took longer than {} seconds", deadline.as_secs_f64()))
        })?
    }

    async fn follow(&self, mut url: Url) -> Result<Bytes, ApiError> {
        for _ in 0..=self.settings.redirects {
            match self.step(&url).await? {
                Step::Done(bytes) => return Ok(bytes),
                Step::Elsewhere(next) => url = next,
            }
        }
        Err(refuse(format!("the address redirects more than {} times", self.settings.redirects)))
    }

    async fn step(&self, url: &Url) -> Result<Step, ApiError> {
        // Before anything is connected to: other schemes mean other ports, or none.
        if !matches!(url.scheme(), "http" | "https") {
            return Err(ApiError::bad(
                format!("`{}` addresses are not fetched", url.scheme()),
                "http and https are",
            ));
        }
        let port = url.port_or_known_default().unwrap_or(80);
        let stream = self.connect(url, port).await?;
        let accept = HeaderValue::from_static("image/png, image/jpeg");
        let headers = HeaderMap::from_iter([(header::ACCEPT, accept)]);
        let response = self.web.get(stream, url, headers).await.map_err(refuse)?;
        if response.status().is_redirection() {
            let next = response
                .headers()
                .get(header::LOCATION)
                .and_then(|value| value.to_str().ok())
                .and_then(|text| url.join(text).ok());
            return next.map(Step::Elsewhere).ok_or_else(|| refuse("it redirects to nowhere"));
        }
        if response.status() != StatusCode::OK {
            return Err(refuse(format!("the address answered {}", response.status())));
        }
        let most = self.settings.most_bytes;
        match Limited::new(response.into_body(), most).collect().await {
            Ok(collected) => Ok(Step::Done(collected.to_bytes())),
            Err(error) if error.is::<http_body_util::LengthLimitError>() => {
                Err(ApiError::too_large(
                    format!("what is at the address has more than {most} bytes"),
                    "link a smaller picture",
                ))
            }
            Err(error) => Err(refuse(format!("the answer broke off: {error}"))),
        }
    }

    async fn connect(&self, url: &Url, port: u16) -> Result<TcpStream, ApiError> {
        let found: Vec<SocketAddr> = match url.host() {
            None => return Err(refuse("the address has no host")),
            Some(Host::Ipv4(ip)) => vec![(ip, port).into()],
            Some(Host::Ipv6(ip)) => vec![(ip, port).into()],
            Some(Host::Domain(name)) => tokio::net::lookup_host((name, port))
                .await
                .map_err(|_| refuse(format!("there is no host `{name}`")))?
                .collect(),
        };
        let mut trouble = None;
        for address in found {
            // One address that is not public is enough: an honest name has none.
            if !(self.allowed)(address.ip()) {
                return Err(ApiError::new(
                    ErrorCode::Forbidden,
                    "the address is not on the public internet",
                    "send the picture itself, or start the server with --allow-private-urls",
                ));
            }
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => trouble = Some(error),
            }
        }
        let why = trouble.map_or("it has no address".to_owned(), |error| error.to_string());
        Err(refuse(format!("cannot reach the address: {why}")))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::response::Redirect;
    use axum::routing::get;

    use super::*;

    /// A server on loopback: small, large, slow, here, there and everywhere.
    async fn elsewhere() -> (u16, Arc<AtomicUsize>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let port = listener.local_addr().expect("is bound").port();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let app = Router::new()
            .route("/small", get(|| async { "small" }))
            .route("/large", get(|| async { "x".repeat(5000) }))
            .route("/missing", get(|| async { StatusCode::NOT_FOUND }))
            .route("/once", get(|| async { Redirect::temporary("/small") }))
            .route("/ever", get(|| async { Redirect::temporary("/ever") }))
            .route("/nowhere", get(|| async { StatusCode::FOUND }))
            .route("/file", get(|| async { Redirect::temporary("file:///etc/passwd") }))
            .route(
                "/inside",
                get(move || async move {
                    Redirect::temporary(&format!("http://127.0.0.2:{port}/small"))
                }),
            )
            .route(
                "/slow",
                get(|| async {
                    tokio::time::sleep(Duration::from_secs(60)).await;
                    "late"
                }),
            )
            .layer(axum::middleware::from_fn(move |request, next: axum::middleware::Next| {
                count.fetch_add(1, Ordering::Relaxed);
                next.run(request)
            }));
        tokio::spawn(async move { axum_serve(listener, app).await });
        (port, asked)
    }

    async fn axum_serve(listener: tokio::net::TcpListener, app: Router) {
        let (_keep, shutdown) = tokio::sync::watch::channel(false);
        let _ = crate::run(listener, app, shutdown).await;
    }

    fn fetcher(allowed: fn(IpAddr) -> bool) -> Fetcher {
        let settings = FetchSettings {
            most_bytes: 4000,
            deadline: Duration::from_millis(700),
            ..FetchSettings::default()
        };
        let mut fetcher = Fetcher::new(settings).expect("makes ready");
        fetcher.allowed = allowed;
        fetcher
    }

    #[tokio::test]
    async fn size_time_and_redirections_are_capped() {
        let (port, asked) = elsewhere().await;
        let fetcher = fetcher(|ip| ip == IpAddr::from([127, 0, 0, 1]));
        let get = |path: &str| {
            let address = format!("http://127.0.0.1:{port}/{path}");
            let fetcher = &fetcher;
            async move { fetcher.fetch(&address).await.map_err(|error| error.0) }
        };
        assert_eq!(get("small").await.expect("is there"), "small");
        assert_eq!(get("once").await.expect("is there"), "small");
        assert_eq!(get("large").await.expect_err("is large").code, ErrorCode::TooLarge);
        let before = asked.load(Ordering::Relaxed);
        assert!(get("ever").await.expect_err("never ends").message.contains("more than 3 times"));
        assert_eq!(asked.load(Ordering::Relaxed) - before, 4, "the first and three more");
        for (path, part) in [
            ("missing", "404"),
            ("nowhere", "nowhere"),
            ("slow", "longer than 0.7 seconds"),
            ("file", "`file` addresses"),
        ] {
            let error = get(path).await.expect_err(path);
            assert_eq!(error.code, ErrorCode::BadRequest, "{path}");
            assert!(error.message.contains(part), "{path}: {}", error.message);
        }
        // Every hop is checked, not only the first.
        assert_eq!(get("inside").await.expect_err("is inside").code, ErrorCode::Forbidden);
    }

    #[tokio::test]
    async fn private_addresses_are_refused_however_they_are_written() {
        let (port, asked) = elsewhere().await;
        let fetcher = fetcher(is_public);
        for address in [
            format!("http://127.0.0.1:{port}/small"),
            format!("http://localhost:{port}/small"),
            format!("http://2130706433:{port}/small"),
            format!("http://0x7f.1:{port}/small"),
            format!("http://0177.0.0.1:{port}/small"),
            format!("http://[::1]:{port}/small"),
            format!("http://[::ffff:127.0.0.1]:{port}/small"),
            format!("http://user@127.0.0.1:{port}/small"),
            "http://10.0.0.1/".to_owned(),
            "https://192.168.1.1/".to_owned(),
            "http://169.254.169.254/latest/meta-data/".to_owned(),
            "http://[fd00:ec2::254]/".to_owned(),
            "http://0.0.0.0/".to_owned(),
        ] {
            let error = fetcher.fetch(&address).await.expect_err(&address).0;
            assert_eq!(error.code, ErrorCode::Forbidden, "{address}: {}", error.message);
            assert!(error.hint.contains("--allow-private-urls"), "{}", error.hint);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0, "nothing was asked");
        for address in ["", "seven.png", "ftp://1.1.1.1/x", "file:///etc/passwd", "http://"] {
            let error = fetcher.fetch(address).await.expect_err(address).0;
            assert_eq!(error.code, ErrorCode::BadRequest, "{address}");
        }
        let settings = FetchSettings { allow_private: true, ..FetchSettings::default() };
        let open = Fetcher::new(settings).expect("makes ready");
        let small = open.fetch(&format!("http://localhost:{port}/small")).await;
        assert_eq!(small.expect("the setting allows it"), "small");
    }
}
