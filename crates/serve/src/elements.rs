//! Reading the elements of a tensor out of whatever lists they lie in: lists of millions never
//! become trees of values.

use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::datatype::Datatype;
use crate::tensor::Elements;

/// The elements of a type, and how many there are.
pub(crate) fn read(
    datatype: Datatype,
    json: &RawValue,
) -> Result<(Elements, usize), serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(json.get());
    if datatype == Datatype::Bytes {
        let mut texts = Vec::new();
        Texts(&mut texts).deserialize(&mut reader)?;
        let count = texts.len();
        return Ok((Elements::Texts(texts), count));
    }
    let mut bytes = Vec::new();
    Numbers { datatype, bytes: &mut bytes }.deserialize(&mut reader)?;
    let count = bytes.len() / datatype.width();
    Ok((Elements::Numbers(bytes), count))
}

struct Numbers<'bytes> {
    datatype: Datatype,
    bytes: &'bytes mut Vec<u8>,
}

impl Numbers<'_> {
    fn refuse<E: Error>(&self, number: impl fmt::Display) -> E {
        let datatype = self.datatype.as_str();
        match self.datatype {
            Datatype::Fp16 | Datatype::Fp32 => {
                E::custom(format!("{number} is not finite as {datatype}"))
            }
            _ => E::custom(format!("{number} is not {datatype}")),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Numbers<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Numbers<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("numbers, or lists of them")
    }

    fn visit_bool<E: Error>(self, bit: bool) -> Result<(), E> {
        if self.datatype != Datatype::Bool {
            return Err(self.refuse(bit));
        }
        self.bytes.push(u8::from(bit));
        Ok(())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<(), E> {
        let done = self.datatype.push_float(number, self.bytes);
        done.ok_or_else(|| self.refuse(number))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<(), E> {
        let done = self.datatype.push_integer(i128::from(number), self.bytes);
        done.ok_or_else(|| self.refuse(number))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<(), E> {
        let done = self.datatype.push_integer(i128::from(number), self.bytes);
        done.ok_or_else(|| self.refuse(number))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let Self { datatype, bytes } = self;
        while list.next_element_seed(Numbers { datatype, bytes: &mut *bytes })?.is_some() {}
        Ok(())
    }
}

struct Texts<'texts>(&'texts mut Vec<String>);

impl<'de> DeserializeSeed<'de> for Texts<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Texts<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("texts, or lists of them")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.0.push(text.to_owned());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Texts(&mut *self.0))?.is_some() {}
        Ok(())
    }
}
