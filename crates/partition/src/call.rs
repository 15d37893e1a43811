//! The record of a call, and the bytes that it sends.

use std::fmt;

use crate::{Rank, WorldSize};

/// The element type of a tensor on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Wire {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision: control sums only.
    F64,
}

impl Wire {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        })
    }
}

/// What a call is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum Class {
    /// Reduces gradients.
    Gradient,
    /// Makes split matrices whole, and brings results back.
    Exchange,
    /// Gathers new weights.
    Weight,
    /// Everything else: sums and decisions.
    Control,
}

impl Class {
    /// Every class, in order.
    pub const ALL: [Self; 4] = [Self::Gradient, Self::Exchange, Self::Weight, Self::Control];
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Gradient => "gradient",
            Self::Exchange => "exchange",
            Self::Weight => "weight",
            Self::Control => "control",
        })
    }
}

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum Collective {
    /// Every rank gets the sum.
    AllReduce,
    /// One rank gets the sum.
    Reduce,
    /// Every rank gets its shard of the sum.
    ReduceScatter,
    /// Every rank gets the shards of all.
    AllGather,
    /// Every rank gets what one has.
    Broadcast,
    /// One rank gets what one other has. The sender records it, the receiver does not.
    Send,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AllReduce => "all-reduce",
            Self::Reduce => "reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::Send => "send",
        })
    }
}

/// One call, as planned or as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Call {
    /// What it is for.
    pub class: Class,
    /// What it does.
    pub collective: Collective,
    /// Elements: inputs of a reduce-scatter, outputs of an all-gather, the tensor's elsewhere.
    pub elems: usize,
    /// Their type on the wire.
    pub wire: Wire,
    /// The destination of a reduce or send, the source of a broadcast, else `None`.
    pub root: Option<Rank>,
}

impl Call {
    /// Payload bytes sent, summed over ranks, by a ring: of n elements, 2(W - 1)·n by an
    /// all-reduce, n by a send, (W - 1)·n by everything else.
    pub fn bytes_sent(&self, world: WorldSize) -> u64 {
        let hops = world.get() as u64 - 1;
        let times = match self.collective {
            Collective::AllReduce => 2 * hops,
            Collective::Send => 1,
            Collective::Reduce
            | Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Broadcast => hops,
        };
        times * self.elems as u64 * self.wire.bytes() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_a_ring() {
        let world = WorldSize::new(4).unwrap();
        let bytes = |collective, wire| {
            Call {
                class: Class::Gradient,
                collective,
                elems: 10,
                wire,
                root: None,
            }
            .bytes_sent(world)
        };
        assert_eq!(bytes(Collective::AllReduce, Wire::F32), 2 * 3 * 10 * 4);
        assert_eq!(bytes(Collective::Reduce, Wire::BF16), 3 * 10 * 2);
        assert_eq!(bytes(Collective::ReduceScatter, Wire::F16), 3 * 10 * 2);
        assert_eq!(bytes(Collective::AllGather, Wire::F64), 3 * 10 * 8);
        assert_eq!(bytes(Collective::Broadcast, Wire::F32), 3 * 10 * 4);
        assert_eq!(bytes(Collective::Send, Wire::F32), 10 * 4);
    }

    #[test]
    fn words() {
        let classes = [
            Class::Gradient,
            Class::Exchange,
            Class::Weight,
            Class::Control,
        ];
        assert_eq!(Class::ALL, classes);
        assert_eq!(
            classes.map(|class| class.to_string()),
            ["gradient", "exchange", "weight", "control"]
        );
        let wires = [Wire::F16, Wire::BF16, Wire::F32, Wire::F64];
        assert_eq!(
            wires.map(|wire| wire.to_string()),
            ["f16", "bf16", "f32", "f64"]
        );
        let collectives = [
            Collective::AllReduce,
            Collective::Reduce,
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::Broadcast,
            Collective::Send,
        ];
        let words = [
            "all-reduce",
            "reduce",
            "reduce-scatter",
            "all-gather",
            "broadcast",
            "send",
        ];
        assert_eq!(collectives.map(|collective| collective.to_string()), words);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn a_call_is_written_in_its_words() {
        let call = Call {
            class: Class::Exchange,
            collective: Collective::AllReduce,
            elems: 7,
            wire: Wire::BF16,
            root: Some(Rank(2)),
        };
        let json = serde_json::to_string(&call).unwrap();
        let words =
            r#"{"class":"exchange","collective":"all-reduce","elems":7,"wire":"bf16","root":2}"#;
        assert_eq!(json, words);
        assert_eq!(serde_json::from_str::<Call>(&json).unwrap(), call);
    }
}
