//! Ops of a `Block`, read from their text with errors in a user's words.
//!
//! An attribute that an op does not have is an error here: one that is misspelt would silently keep
//! its default.

use serde::de::value::{Error, U32Deserializer};
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, VariantAccess, Visitor,
};
use serde::{Deserialize, forward_to_deserialize_any};

use super::error::{ModelError, Problem, lower, nearest};
use super::locate::keys;
use crate::model::Cx;
use crate::ops::{Op, OpKind, Origin};

/// Reads `matmul(transpose_b:true)`, which is the field `op` of what is at hand.
pub(super) fn read_op(cx: &Cx<'_>, text: &str) -> Result<Op, ModelError> {
    let text = text.trim();
    let name = text.split('(').next().unwrap_or_default();
    let Some(&kind) = OpKind::ALL.iter().find(|it| it.name() == name) else {
        let known = OpKind::ALL.iter().filter(|it| it.origins().contains(&Origin::Model));
        let known = known.map(|it| it.name().to_string()).collect();
        let (block, found) = (cx.title(), name.to_string());
        return Err(cx.error("op", Problem::UnknownOp { block, found, known }));
    };
    let fail = |why| cx.error("op", Problem::Op { block: cx.title(), why });
    let known = attributes(kind);
    if let Some(key) = keys(text).into_iter().find(|it| !known.contains(&it.as_str())) {
        return Err(fail(unknown_attribute(name, &key, known)));
    }
    // The parser's position is one in the attributes, not in the file.
    Op::from_text(text).map_err(|it| {
        let why = it.split_once(": ").map_or(it.as_str(), |it| it.1);
        let missing = why.strip_prefix("Unexpected missing field named `");
        fail(match missing.and_then(|it| it.split_once('`')) {
            Some((field, _)) => format!("`{name}` needs the attribute `{field}`"),
            None => format!("attributes of `{name}`: {}", lower(why)),
        })
    })
}

fn unknown_attribute(name: &str, key: &str, known: &[&str]) -> String {
    let known: Vec<String> = known.iter().map(|it| it.to_string()).collect();
    let hint = match nearest(key, &known) {
        Some(near) => format!("did you mean `{near}`?"),
        None if known.is_empty() => "it has none".to_string(),
        None => format!("it has {}", known.join(", ")),
    };
    format!("`{name}` has no attribute `{key}`; {hint}")
}

/// The attributes of an op, as serde knows them.
pub(super) fn attributes(kind: OpKind) -> &'static [&'static str] {
    let mut found: &'static [&'static str] = &[];
    // The error is how the probe stops.
    let _ = Op::deserialize(Probe { variant: kind as u32, found: &mut found });
    found
}

/// Deserializes an [`Op`] as far as the list of its fields.
struct Probe<'a> {
    variant: u32,
    found: &'a mut &'static [&'static str],
}

fn stop<T>() -> Result<T, Error> {
    Err(serde::de::Error::custom("the fields are known"))
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        stop()
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_enum(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        *self.found = fields;
        stop()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map identifier ignored_any
    }
}

impl<'de> EnumAccess<'de> for Probe<'_> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Error> {
        let variant: U32Deserializer<Error> = self.variant.into_deserializer();
        Ok((seed.deserialize(variant)?, self))
    }
}

impl<'de> VariantAccess<'de> for Probe<'_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        stop()
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Error> {
        stop()
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_those_of_the_struct() {
        let matmul = ["transpose_a", "transpose_b", "out", "accumulate", "bias", "gelu"];
        assert_eq!(attributes(OpKind::Matmul), matmul);
        assert_eq!(attributes(OpKind::Scale), ["factor"]);
        assert_eq!(attributes(OpKind::ZerosLike), [""; 0]);
        for &kind in OpKind::ALL {
            for sample in kind.samples() {
                let found = keys(&sample.op.to_text());
                let known = attributes(kind);
                assert!(found.iter().all(|it| known.contains(&it.as_str())), "{}", kind.name());
            }
        }
    }
}
