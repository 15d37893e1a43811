//! The choices: placement, route, policy and stage, with their words.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// An enum of choices with its list, and its words for people and command lines.
macro_rules! choice {
    (
        $(#[$docs:meta])*
        $what:literal $name:ident[$count:literal] { $($(#[$variant_docs:meta])* $variant:ident = $word:literal),+ $(,)? }
    ) => {
        $(#[$docs])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$variant_docs])* $variant),+ }

        impl $name {
            /// Every choice, in order.
            pub const ALL: [Self; $count] = [$(Self::$variant),+];

            const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.word())
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(given: &str) -> Result<Self, Error> {
                Self::ALL.into_iter().find(|choice| choice.word() == given).ok_or_else(|| Error::UnknownChoice {
                    what: $what,
                    given: given.to_owned(),
                    choices: Self::ALL.map(Self::word).join(", "),
                })
            }
        }
    };
}

choice! {
    /// Where parameters lie in their flat space, and who owns what of it.
    #[derive(Default)]
    "placement" Placement[3] {
        /// One block a bucket, cut evenly: gradients are reduce-scattered in place.
        #[default]
        Striped = "striped",
        /// One block a flat space, in DeepSpeed's order.
        Flat = "flat",
        /// One block a bucket, whole matrices to ranks as far as the balance allows.
        Whole = "whole",
    }
}

choice! {
    /// How gradients are reduced.
    #[derive(Default)]
    "route" Route[4] {
        /// Every rank keeps the whole reduced gradient.
        AllReduce = "all-reduce",
        /// One all-reduce a bucket, of which a rank keeps what it consumes.
        BucketAllReduce = "bucket-all-reduce",
        /// One reduce an owner.
        ReduceToOwner = "reduce-to-owner",
        /// One reduce-scatter a bucket where the bucket is a block, else one reduce an owner.
        #[default]
        ReduceScatter = "reduce-scatter",
    }
}

choice! {
    /// How the matrices that are split over ranks get whole for Newton-Schulz.
    #[derive(Default)]
    "policy" Policy[3] {
        /// Every owner of a split parameter keeps its whole gradient and momentum.
        CopyToOwners = "copy-to-owners",
        /// Owners of a split matrix swap slices of the momentum's update, and each orthogonalizes.
        ExchangeUpdate = "exchange-update",
        /// One rank orthogonalizes a matrix and hands slices of the result back.
        #[default]
        AssignOwner = "assign-owner",
    }
}

choice! {
    /// What is sharded.
    #[derive(Default)]
    "stage" Stage[2] {
        /// Optimizer state: gradients are accumulated whole and reduced at the boundary.
        One = "1",
        /// Optimizer state and gradients: reduced every micro-batch, accumulated as shards.
        #[default]
        Two = "2",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_go_both_ways() {
        for placement in Placement::ALL {
            assert_eq!(placement.to_string().parse(), Ok(placement));
        }
        for route in Route::ALL {
            assert_eq!(route.to_string().parse(), Ok(route));
        }
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        for stage in Stage::ALL {
            assert_eq!(stage.to_string().parse(), Ok(stage));
        }
        assert_eq!("bucket-all-reduce".parse(), Ok(Route::BucketAllReduce));
    }

    #[test]
    fn an_unknown_word_gets_the_list() {
        let error = "stripes".parse::<Placement>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown placement `stripes`; choose one of striped, flat, whole"
        );
    }

    #[test]
    fn defaults() {
        assert_eq!(Placement::default(), Placement::Striped);
        assert_eq!(Route::default(), Route::ReduceScatter);
        assert_eq!(Policy::default(), Policy::AssignOwner);
    }
}
