//! The live page: one document without a single outside part. It is the same for everyone and
//! holds nothing of any run; what it shows it asks the other routes for, with the reader's key.

use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderName, HeaderValue, header};
use sha2::{Digest, Sha256};

const STYLE: &str = include_str!("../page/page.css");
/// One script in the page, whose parts use each other: `words` first, `page`, which starts, last.
const SCRIPTS: [&str; 7] = [
    include_str!("../page/words.js"),
    include_str!("../page/chart.js"),
    include_str!("../page/curves.js"),
    include_str!("../page/workers.js"),
    include_str!("../page/events.js"),
    include_str!("../page/cost.js"),
    include_str!("../page/page.js"),
];

/// The document, and a policy under which a browser runs these very scripts and no others: a name
/// that a worker made up cannot become one.
static PAGE: LazyLock<(String, HeaderValue)> = LazyLock::new(|| {
    let script = format!("\"use strict\";\n{}", SCRIPTS.concat());
    let document = include_str!("../page/page.html")
        .replace("{{style}}", STYLE)
        .replace("{{script}}", &script);
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text.as_bytes()));
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash(&script),
        hash(STYLE)
    );
    let policy = HeaderValue::from_str(&policy).expect("the policy is plain ASCII");
    (document, policy)
});

/// The live page.
#[utoipa::path(get, path = "/",
    responses((status = 200, description = "The live page", content_type = "text/html")))]
pub(crate) async fn live_page() -> Response {
    let (document, policy) = &*PAGE;
    let fixed = |text| HeaderValue::from_static(text);
    let headers: [(HeaderName, HeaderValue); 5] = [
        (header::CONTENT_TYPE, fixed("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, policy.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, fixed("nosniff")),
        (header::REFERRER_POLICY, fixed("no-referrer")),
        (header::CACHE_CONTROL, fixed("no-cache")),
    ];
    (headers, document.as_str()).into_response()
}
