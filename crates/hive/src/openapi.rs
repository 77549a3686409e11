//! The interface in OpenAPI's terms, generated from the routes.

use utoipa::OpenApi;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};

use crate::routes;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Skep hive",
        description = "A hive keeps versioned parameters; workers pull them and bring home gradients."
    ),
    paths(
        routes::list_runs,
        routes::create_run,
        routes::show_run,
        routes::change_run,
        routes::delete_run,
        routes::get_parameters,
        routes::take_lease,
        routes::renew_lease,
        routes::give_back_lease,
        routes::contribute,
        routes::get_shard,
        routes::put_shard,
        routes::follow_events,
        routes::get_history,
        routes::get_progress,
        routes::get_logs,
        routes::post_logs,
        routes::create_key,
        routes::revoke_key,
        routes::live_page,
        routes::healthz,
        routes::readyz,
        routes::metrics,
        routes::openapi,
    ),
    components(schemas(skep_wire::RunSpec, skep_wire::EvaluationCounts))
)]
struct Document;

/// The document that `/openapi.json` serves.
pub fn document() -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    let key = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
    if let Some(components) = &mut document.components {
        components.add_security_scheme("key", key);
    }
    document
}
