//! The envelope: what a contribution says about itself, in HTTP headers, so that the body is
//! nothing but tensors.

use std::str::FromStr;

use http::{HeaderMap, HeaderName, HeaderValue};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{LeaseId, Version, WireError};

/// The names of the headers.
pub mod header {
    /// The lease a contribution was made under.
    pub const LEASE: &str = "skep-lease";
    /// The contribution's number under its lease, from 0.
    pub const SEQUENCE: &str = "skep-sequence";
    /// The first position it covers.
    pub const FIRST: &str = "skep-first";
    /// How many positions it covers.
    pub const COUNT: &str = "skep-count";
    /// The version it was computed on.
    pub const BASE: &str = "skep-base";
    /// What it is.
    pub const KIND: &str = "skep-kind";
    /// How its numbers are written.
    pub const ENCODING: &str = "skep-encoding";
    /// The mean loss over its samples.
    pub const LOSS: &str = "skep-loss";
    /// The encoding in which the newest parameters are wanted in the answer.
    pub const WANT: &str = "skep-want";
    /// The version the worker has; the answer carries parameters only if there is a newer one.
    pub const HAVE: &str = "skep-have";
    /// What is not wanted of the parameters in the answer.
    pub const WITHOUT: &str = "skep-without";
    /// In answers: what became of the contribution.
    pub const OUTCOME: &str = "skep-outcome";
    /// In answers: the version now.
    pub const VERSION: &str = "skep-version";
    /// In answers: the newest version that would survive a crash of the hive.
    pub const DURABLE: &str = "skep-durable";
}

/// How the `F32` tensors of a run are written in a frame. Other element types stay as they are.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    ToSchema,
)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Encoding {
    /// As they are.
    #[default]
    F32,
    /// Rounded to the upper 16 bits: half the bytes.
    Bf16,
}

impl Encoding {
    /// The element type a tensor has in a frame of this encoding.
    pub fn of(self, dtype: Dtype) -> Dtype {
        match (self, dtype) {
            (Self::Bf16, Dtype::F32) => Dtype::BF16,
            (_, dtype) => dtype,
        }
    }

    /// The name in headers and addresses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl FromStr for Encoding {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err(WireError::HeaderInvalid {
                name: header::ENCODING,
                expected: "`f32` or `bf16`",
            }),
        }
    }
}

/// What a reader of parameters can do without, because it has it already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Without {
    /// Tensors that never change.
    Frozen,
}

impl Without {
    /// The name in headers and addresses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Frozen => "frozen",
        }
    }
}

impl FromStr for Without {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        match text {
            "frozen" => Ok(Self::Frozen),
            _ => Err(WireError::HeaderInvalid { name: header::WITHOUT, expected: "`frozen`" }),
        }
    }
}

/// What a worker brings home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ContributionKind {
    /// The mean gradient of its samples, and the buffers' new values.
    Gradient,
    /// What local training changed: the difference to the base version, and the buffers' new values.
    Model,
    /// Counts of an evaluation, as JSON.
    Evaluation,
}

impl ContributionKind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Gradient => "gradient",
            Self::Model => "model",
            Self::Evaluation => "evaluation",
        }
    }
}

/// Everything a contribution says about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Envelope {
    /// The lease it was made under.
    pub lease: LeaseId,
    /// Its number under that lease.
    pub sequence: u64,
    /// The first position.
    pub first: u64,
    /// How many positions.
    pub count: u64,
    /// The version it was computed on.
    pub base: Version,
    /// What it is.
    pub kind: ContributionKind,
    /// How its numbers are written.
    pub encoding: Encoding,
    /// The mean loss over its samples.
    pub loss: Option<f64>,
    /// The encoding in which newer parameters are wanted back.
    pub want: Option<Encoding>,
    /// The version the worker has.
    pub have: Option<Version>,
    /// What is not wanted of those parameters.
    pub without: Option<Without>,
}

impl Envelope {
    /// Writes the headers.
    pub fn write(&self, headers: &mut HeaderMap) {
        put(headers, header::LEASE, &self.lease);
        put(headers, header::SEQUENCE, &self.sequence);
        put(headers, header::FIRST, &self.first);
        put(headers, header::COUNT, &self.count);
        put(headers, header::BASE, &self.base);
        put(headers, header::KIND, &self.kind.as_str());
        put(headers, header::ENCODING, &self.encoding.as_str());
        if let Some(loss) = self.loss {
            // With an exponent: written out, the largest has more digits than a header may.
            put(headers, header::LOSS, &format_args!("{loss:e}"));
        }
        if let Some(want) = self.want {
            put(headers, header::WANT, &want.as_str());
        }
        if let Some(have) = self.have {
            put(headers, header::HAVE, &have);
        }
        if let Some(without) = self.without {
            put(headers, header::WITHOUT, &without.as_str());
        }
    }

    /// Reads and checks the headers.
    pub fn read(headers: &HeaderMap) -> Result<Self, WireError> {
        let kind = match text(headers, header::KIND)? {
            Some("gradient") => ContributionKind::Gradient,
            Some("model") => ContributionKind::Model,
            Some("evaluation") => ContributionKind::Evaluation,
            None => return Err(WireError::HeaderMissing(header::KIND)),
            Some(_) => {
                return Err(WireError::HeaderInvalid {
                    name: header::KIND,
                    expected: "`gradient`, `model` or `evaluation`",
                });
            }
        };
        let loss: Option<f64> = optional(headers, header::LOSS, "a number")?;
        Ok(Self {
            lease: required(headers, header::LEASE, "32 hexadecimal digits")?,
            sequence: required(headers, header::SEQUENCE, "a whole number")?,
            first: required(headers, header::FIRST, "a whole number")?,
            count: required(headers, header::COUNT, "a whole number")?,
            base: required(headers, header::BASE, "a version like `2.140`")?,
            kind,
            encoding: optional(headers, header::ENCODING, "`f32` or `bf16`")?.unwrap_or_default(),
            loss,
            want: optional(headers, header::WANT, "`f32` or `bf16`")?,
            have: optional(headers, header::HAVE, "a version like `2.140`")?,
            without: optional(headers, header::WITHOUT, "`frozen`")?,
        })
    }
}

/// What became of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Outcome {
    /// It counts, and waits for others.
    Accepted,
    /// It counts, and the version it completed is out.
    Stepped,
    /// It was accepted, but the version it led to was not finite: its positions are free again.
    Refused,
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Stepped => "stepped",
            Self::Refused => "refused",
        }
    }
}

/// The headers of the answer to a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// What became of it. A repeat of a sequence number gets the first outcome.
    pub outcome: Outcome,
    /// The version now.
    pub version: Version,
    /// The newest version that would survive a crash of the hive.
    pub durable: Version,
}

impl Receipt {
    /// Writes the headers.
    pub fn write(&self, headers: &mut HeaderMap) {
        put(headers, header::OUTCOME, &self.outcome.as_str());
        put(headers, header::VERSION, &self.version);
        put(headers, header::DURABLE, &self.durable);
    }

    /// Reads and checks the headers.
    pub fn read(headers: &HeaderMap) -> Result<Self, WireError> {
        let outcome = match text(headers, header::OUTCOME)? {
            Some("accepted") => Outcome::Accepted,
            Some("stepped") => Outcome::Stepped,
            Some("refused") => Outcome::Refused,
            None => return Err(WireError::HeaderMissing(header::OUTCOME)),
            Some(_) => {
                return Err(WireError::HeaderInvalid {
                    name: header::OUTCOME,
                    expected: "an outcome",
                });
            }
        };
        Ok(Self {
            outcome,
            version: required(headers, header::VERSION, "a version like `2.140`")?,
            durable: required(headers, header::DURABLE, "a version like `2.140`")?,
        })
    }
}

fn put(headers: &mut HeaderMap, name: &'static str, value: &dyn std::fmt::Display) {
    let value = HeaderValue::try_from(value.to_string())
        .expect("numbers, versions and lease ids are visible ASCII");
    headers.insert(HeaderName::from_static(name), value);
}

fn text<'headers>(
    headers: &'headers HeaderMap,
    name: &'static str,
) -> Result<Option<&'headers str>, WireError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() || value.len() > 128 {
        return Err(WireError::HeaderInvalid { name, expected: "given once, in brief" });
    }
    value
        .to_str()
        .map(Some)
        .map_err(|_| WireError::HeaderInvalid { name, expected: "visible ASCII" })
}

fn optional<T: FromStr>(
    headers: &HeaderMap,
    name: &'static str,
    expected: &'static str,
) -> Result<Option<T>, WireError> {
    text(headers, name)?
        .map(|text| text.parse().map_err(|_| WireError::HeaderInvalid { name, expected }))
        .transpose()
}

fn required<T: FromStr>(
    headers: &HeaderMap,
    name: &'static str,
    expected: &'static str,
) -> Result<T, WireError> {
    optional(headers, name, expected)?.ok_or(WireError::HeaderMissing(name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_envelope_survives_its_headers(
            lease: u128, sequence: u64, first: u64, count: u64, generation: u64, number: u64,
            loss in proptest::option::of(prop::num::f64::NORMAL | prop::num::f64::SUBNORMAL), narrow: bool, want: bool,
        ) {
            let encoding = if narrow { Encoding::Bf16 } else { Encoding::F32 };
            let envelope = Envelope {
                lease: LeaseId(lease), sequence, first, count,
                base: Version::new(generation, number),
                kind: if want { ContributionKind::Model } else { ContributionKind::Gradient },
                encoding, loss,
                want: want.then_some(encoding), have: want.then_some(Version::new(number, first)),
                without: narrow.then_some(Without::Frozen),
            };
            let mut headers = HeaderMap::new();
            envelope.write(&mut headers);
            prop_assert_eq!(Envelope::read(&headers).expect("own headers"), envelope);
        }
    }

    #[test]
    fn a_header_given_twice_is_refused() {
        let mut headers = HeaderMap::new();
        headers.append(header::OUTCOME, HeaderValue::from_static("accepted"));
        headers.append(header::OUTCOME, HeaderValue::from_static("stepped"));
        assert!(Receipt::read(&headers).is_err());
    }
}
