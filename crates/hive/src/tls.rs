//! TLS by rustls: certificates of one's own, or one that is made once and kept.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};

use crate::HiveError;

/// A certificate with its key.
pub struct TlsIdentity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

fn wrong(what: impl std::fmt::Display) -> HiveError {
    HiveError::Tls(what.to_string())
}

impl TlsIdentity {
    /// Reads PEM files.
    pub fn load(certificate: &Path, key: &Path) -> Result<Self, HiveError> {
        let chain: Vec<_> = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect)
            .map_err(|error| wrong(format!("{}: {error}", certificate.display())))?;
        if chain.is_empty() {
            return Err(wrong(format!("{}: no certificate in it", certificate.display())));
        }
        let key = PrivateKeyDer::from_pem_file(key)
            .map_err(|error| wrong(format!("{}: {error}", key.display())))?;
        Ok(Self { chain, key })
    }

    /// Takes the certificate kept in a folder, or makes and keeps one for these names.
    pub fn auto(folder: &Path, names: &[String]) -> Result<Self, HiveError> {
        let certificate = folder.join("hive.crt");
        let key = folder.join("hive.key");
        if !(certificate.exists() && key.exists()) {
            let made = rcgen::generate_simple_self_signed(names.to_vec()).map_err(wrong)?;
            std::fs::create_dir_all(folder)
                .map_err(|error| wrong(format!("{}: {error}", folder.display())))?;
            write_private(&key, &made.signing_key.serialize_pem())?;
            write_private(&certificate, &made.cert.pem())?;
        }
        Self::load(&certificate, &key)
    }

    /// SHA-256 of the certificate, which a worker can pin.
    pub fn fingerprint(&self) -> String {
        fingerprint(&self.chain[0])
    }

    pub(crate) fn config(self) -> Result<Arc<ServerConfig>, HiveError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(wrong)?
            .with_no_client_auth()
            .with_single_cert(self.chain, self.key)
            .map_err(wrong)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

/// SHA-256 of a certificate, as `sha256:` and hexadecimal digits.
pub fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    let digest = Sha256::digest(certificate.as_ref());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Writes a file that only its owner can read, whole or not at all.
fn write_private(path: &Path, text: &str) -> Result<(), HiveError> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let explain = |error: std::io::Error| wrong(format!("{}: {error}", path.display()));
    let staged = path.with_extension("new");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&staged)
        .map_err(explain)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(explain)?;
    std::fs::rename(&staged, path).map_err(explain)
}
