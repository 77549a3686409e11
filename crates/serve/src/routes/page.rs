//! The page: one file in the binary, with nothing from elsewhere.

use std::sync::{Arc, LazyLock};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::Serving;
use crate::tensor::TensorSpec;

const PAGE: &str = include_str!("../page.html");

/// Names the page's own script and style by their hashes, so that a browser runs nothing else.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |tag: &str| {
        let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
        let text = PAGE.split_once(&open).and_then(|(_, rest)| rest.split_once(&close));
        let digest = Sha256::digest(text.map_or("", |(text, _)| text).as_bytes());
        format!("'sha256-{}'", STANDARD.encode(digest))
    };
    format!(
        "default-src 'none'; script-src {}; style-src {}; img-src 'self' data: blob:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash("script"),
        hash("style")
    )
});

pub(crate) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}

/// What the page needs to know of the model.
pub(crate) async fn model(State(serving): State<Arc<Serving>>) -> Json<Value> {
    let model = &serving.model;
    Json(json!({
        "name": model.name,
        "kind": model.kind(),
        "takes": model.takes(),
        "ink": model.is_ink(),
        "classes": model.classes(),
        "inputs": model.inputs.iter().map(TensorSpec::describe).collect::<Vec<_>>(),
        "version": serving.loaded().map(|loaded| loaded.version.clone()),
    }))
}
